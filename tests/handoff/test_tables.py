"""The two state tables: whole, reachable, and final where they should be."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

import pytest

from kvlease.handoff.errors import IllegalMove
from kvlease.handoff.tables import (
    DECODE_TABLE,
    PREFILL_TABLE,
    DecodeEvent,
    DecodeState,
    PrefillEvent,
    PrefillState,
    decode_is_over,
    decode_move,
    prefill_is_over,
    prefill_move,
)

State = TypeVar("State", bound=StrEnum)
Event = TypeVar("Event", bound=StrEnum)

DECODE_ENDS = {DecodeState.COMMITTED, DecodeState.COMPLETED, DecodeState.REJECTED, DecodeState.ABORTED}
PREFILL_ENDS = {PrefillState.RECEIPTED, PrefillState.COMPLETED, PrefillState.REJECTED, PrefillState.ABORTED}


def reachable(table: Mapping[State, Mapping[Event, State]], start: State) -> set[State]:
    found, to_visit = {start}, [start]
    while to_visit:
        fresh = set(table[to_visit.pop()].values()) - found
        found |= fresh
        to_visit += fresh
    return found


def test_every_decode_state_is_reachable() -> None:
    assert reachable(DECODE_TABLE, DecodeState.PROPOSED) == set(DecodeState) == set(DECODE_TABLE)


def test_every_prefill_state_is_reachable() -> None:
    assert reachable(PREFILL_TABLE, PrefillState.RECEIVED) == set(PrefillState) == set(PREFILL_TABLE)


def test_every_event_moves_some_state() -> None:
    assert {event for row in DECODE_TABLE.values() for event in row} == set(DecodeEvent)
    assert {event for row in PREFILL_TABLE.values() for event in row} == set(PrefillEvent)


def test_the_ends_are_these_and_absorb() -> None:
    assert {state for state in DecodeState if decode_is_over(state)} == DECODE_ENDS
    assert {state for state in PrefillState if prefill_is_over(state)} == PREFILL_ENDS


def test_everything_that_lives_can_be_ended() -> None:
    for decode_state in set(DecodeState) - DECODE_ENDS:
        assert decode_move(decode_state, DecodeEvent.END) is DecodeState.ABORTED
    for prefill_state in set(PrefillState) - PREFILL_ENDS:
        assert prefill_move(prefill_state, PrefillEvent.END) is PrefillState.ABORTED


@pytest.mark.parametrize("state", DecodeState)
@pytest.mark.parametrize("event", DecodeEvent)
def test_decode_moves_by_its_table_or_says_why_not(state: DecodeState, event: DecodeEvent) -> None:
    if event in DECODE_TABLE[state]:
        assert decode_move(state, event) is DECODE_TABLE[state][event]
        return
    with pytest.raises(IllegalMove) as caught:
        decode_move(state, event)
    assert (caught.value.role, caught.value.state, caught.value.event) == ("decode", state, event)


@pytest.mark.parametrize("state", PrefillState)
@pytest.mark.parametrize("event", PrefillEvent)
def test_prefill_moves_by_its_table_or_says_why_not(state: PrefillState, event: PrefillEvent) -> None:
    if event in PREFILL_TABLE[state]:
        assert prefill_move(state, event) is PREFILL_TABLE[state][event]
        return
    with pytest.raises(IllegalMove) as caught:
        prefill_move(state, event)
    assert (caught.value.role, caught.value.state, caught.value.event) == ("prefill", state, event)
