"""Stray writes while a block is being landed: refused, or too late to matter, and never readable."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import numpy as np
import pytest
import xxhash

from kvlease.kvcache.canonical import HostWindow, SlotRun, WirePlan, copy_in
from kvlease.kvcache.landing import Landed, Refused
from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.seal import SEAL_BYTES
from tests.kvcache.border import LAYOUT, Source, Target


def moments(target: Target, action: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """How to have `action` done at each moment of a landing."""

    def during(index: int) -> None:
        target.storage.during = {index: action}

    def before_copy() -> None:
        target.ledger.before_copy = action

    def after_digest() -> None:
        target.storage.after_digest = action

    inside = {f"before array {index}": (lambda index=index: during(index)) for index in range(4)}
    return {"before copy": before_copy, **inside, "after digest": after_digest}


MOMENTS = ["before copy", *(f"before array {index}" for index in range(4)), "after digest"]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("ours", [3, 4])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stray_write_at_any_moment_never_becomes_readable(moment: str, ours: int, *, staged: bool) -> None:
    source = Source()
    spans = LAYOUT.spans(4)
    victims = [0, 20, 250, *(SEAL_BYTES + span.offset_bytes + 5 for span in spans)]
    outcomes = set()
    for victim in victims:
        target = Target(source, ours, staged=staged)
        slot = source.sealed(1)

        def stray(slot: bytearray = slot, victim: int = victim) -> None:
            slot[victim : victim + 8] = b"\x5a" * 8

        moments(target, stray)[moment]()
        outcome = target.land(slot)
        outcomes.add(type(outcome))
        if isinstance(outcome, Landed):
            assert target.has(source, 1)
            assert target.proven() == [False] * 4 + [True] * 4 + [False] * 2
        else:
            assert outcome.check == "digest"
            assert not any(target.proven())
        target.check_others_untouched()
    assert outcomes == ({Landed} if moment == "after digest" else {Landed, Refused})


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_header_may_change_after_it_was_copied_and_decides_nothing_more(moment: str) -> None:
    source = Source()
    target = Target(source)
    slot, other = source.sealed(1), source.sealed(0)

    def swap_header() -> None:
        slot[:SEAL_BYTES] = other[:SEAL_BYTES]

    moments(target, swap_header)[moment]()
    assert target.land(slot) == Landed(1, 4)
    assert target.has(source, 1)
    assert target.proven() == [False] * 4 + [True] * 4 + [False] * 2


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_whole_other_block_written_over_it_is_not_mixed_in(moment: str) -> None:
    source = Source()
    target = Target(source)
    slot, other = source.sealed(1), source.sealed(0)

    def overwrite() -> None:
        slot[:] = other

    moments(target, overwrite)[moment]()
    outcome = target.land(slot)
    assert target.has(source, 1) if isinstance(outcome, Landed) else not any(target.proven())
    assert isinstance(outcome, Landed) == (moment == "after digest")


def test_a_thread_that_writes_into_the_ring_all_the_time_spoils_blocks_but_no_read() -> None:
    source = Source(attention_layout(4, 2, 64, "float32"), 16, range(32), 16)
    target = Target(source, 16)
    clean, other = (np.frombuffer(source.sealed(position), dtype=np.uint8) for position in (0, 1))
    slot = clean.copy()
    stop = threading.Event()

    def overwrite() -> None:
        while not stop.is_set():
            for block in (clean, clean, other):
                slot[:] = block  # outside the interpreter's lock, so it tears the reads of the other thread

    thread = threading.Thread(target=overwrite)
    thread.start()
    outcomes = set()
    try:
        for attempt in range(20_000):
            outcome = target.land(slot.data)
            outcomes.add(type(outcome))
            if isinstance(outcome, Landed):
                assert target.has(source, outcome.position)
                target.ledger.clear(target.table)
            assert not any(target.proven())
            if attempt >= 500 and outcomes == {Landed, Refused}:
                break
    finally:
        stop.set()
        thread.join()
    assert outcomes == {Landed, Refused}
    target.check_others_untouched()


class RestoredRing:
    """A slot that a stray write spoils, and another restores as soon as it was read: any second look finds good bytes."""

    def __init__(self, good: bytes, spoiled: bytes) -> None:
        self._good, self._spoiled, self._looks = good, spoiled, 0

    def __len__(self) -> int:
        return len(self._good)

    def __getitem__(self, part: slice) -> memoryview:
        self._looks += 1
        return memoryview(self._spoiled if self._looks == 1 else self._good)[part]


def test_the_digest_is_of_what_was_copied_whatever_the_ring_holds_by_then() -> None:
    plan = WirePlan.of(attention_layout(1, 1, 1, "float32"), 2)
    good = bytearray(plan.content_bytes)
    for span in plan.spans:
        good[span.start : span.start + 8] = b"computed"
    spoiled = bytes([good[0] ^ 0xFF]) + bytes(good[1:])
    slots = [bytearray(8), bytearray(8)]
    window = HostWindow([memoryview(part) for part in slots], (SlotRun(0, 2),))
    digest = copy_in(plan, window, cast("memoryview", RestoredRing(bytes(good), spoiled)))
    assert bytes(slots[0]) == spoiled[:8]
    assert digest != xxhash.xxh3_128(good).digest()
    assert digest == xxhash.xxh3_128(spoiled).digest()
