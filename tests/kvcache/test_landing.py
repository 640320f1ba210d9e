"""Landing: whatever is in the ring, at whatever moment, only verified bytes become readable, in the table alone."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.landing import Landed, Refused, peek_lease
from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.seal import SEAL_BYTES, Seal
from tests.kvcache.border import LAYOUT, SEQUENCE, TOKENS, Source, SpoiledLedger, Target

# -- what is good arrives


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ours", "theirs", "wire"), [*product((8, 16, 32), repeat=3)])
def test_a_prompt_arrives_bit_for_bit(dtype: str, ours: int, theirs: int, wire: int) -> None:
    source = Source(attention_layout(3, 2, 5, dtype), theirs, range(75), wire)
    target = Target(source, ours)
    order = random.Random(wire).sample(range(source.num_blocks), source.num_blocks)
    for position in order:
        assert target.land(source.sealed(position)) == Landed(position, target.expectation.num_valid(position))
    readable = target.ledger.readable(SEQUENCE, target.table, 75)
    assert readable.num_tokens == 75
    assert target.content() == source.storage.read_canonical(source.table, 0, 75)
    target.check_others_untouched()
    with pytest.raises(UnprovenSlot):
        target.ledger.computed(SEQUENCE, target.table, 1)


@pytest.mark.parametrize(("ours", "theirs", "wire"), [(8, 16, 8), (16, 8, 8), (8, 8, 8)])
def test_a_prompt_arrives_through_staging_buffers_on_both_sides(ours: int, theirs: int, wire: int) -> None:
    source = Source(attention_layout(3, 2, 5, "bfloat16"), theirs, range(43), wire, staged=True)
    target = Target(source, ours, staged=True)
    for position in range(source.num_blocks):
        assert isinstance(target.land(source.sealed(position)), Landed)
    target.ledger.readable(SEQUENCE, target.table, 43)
    assert target.content() == source.storage.read_canonical(source.table, 0, 43)
    target.check_others_untouched()


def test_only_the_tokens_of_a_landed_block_become_readable() -> None:
    source = Source()
    target = Target(source)
    assert target.land(source.sealed(1)) == Landed(1, 4)
    assert target.proven() == [False] * 4 + [True] * 4 + [False] * 2
    with pytest.raises(UnprovenSlot):
        target.ledger.readable(SEQUENCE, target.table, 1)
    target.land(source.sealed(0))
    target.land(source.sealed(2))
    target.ledger.readable(SEQUENCE, target.table, 10)
    with pytest.raises(UnprovenSlot):
        target.ledger.readable(SEQUENCE, target.table, 11)


def test_a_one_token_delivery_makes_one_token_readable() -> None:
    source = Source(tokens=TOKENS[:1])
    target = Target(source)
    assert target.land(source.sealed(0)) == Landed(0, 1)
    assert target.proven() == [True]
    with pytest.raises(UnprovenSlot):
        target.ledger.readable(SEQUENCE, target.table, 2)


# -- what is bad is refused, and says why


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("check", "make"),
    [
        ("lease", lambda source: source.sealed(1, lease_id=b"x" * 16)),
        ("nonce", lambda source: source.sealed(1, nonce=b"x" * 16)),
        ("fingerprint", lambda source: source.sealed(1, fingerprint=b"x" * 16)),
        ("chain", lambda source: source.resealed(1, chain=b"x" * 16)),
        ("chain", lambda source: source.resealed(1, position=0)),
        ("position", lambda source: source.resealed(1, position=3)),
        ("position", lambda source: source.resealed(1, position=2**64 - 1)),
        ("valid_tokens", lambda source: source.resealed(1, num_valid=3)),
        ("valid_tokens", lambda source: source.resealed(2, num_valid=4)),
        ("valid_tokens", lambda source: source.resealed(1, num_valid=0)),
        ("valid_tokens", lambda source: source.resealed(1, num_valid=2**32 - 1)),
        ("digest", lambda source: source.resealed(1, digest=b"x" * 16)),
        ("length", lambda source: source.sealed(1)[:-1]),
        ("length", lambda source: source.sealed(1)[:SEAL_BYTES]),
        ("length", lambda source: source.sealed(1)[:10]),
        ("length", lambda source: bytearray()),
        ("length", lambda source: source.sealed(1) + bytes(64)),
        ("magic", lambda source: bytearray(len(source.sealed(1)))),
        ("magic", lambda source: bytearray(SEAL_BYTES) + source.sealed(1)[SEAL_BYTES:]),
    ],
)
def test_a_wrong_block_is_refused_by_the_check_that_names_it(
    check: str, make: Callable[[Source], bytearray], *, staged: bool
) -> None:
    source = Source()
    target = Target(source, staged=staged)
    outcome = target.land(make(source))
    assert isinstance(outcome, Refused)
    assert outcome.check == check
    assert not any(target.proven())
    target.check_others_untouched()


@pytest.mark.parametrize("index", range(SEAL_BYTES))
def test_every_byte_of_the_header_matters(index: int) -> None:
    source = Source()
    target = Target(source)
    slot = source.sealed(2)
    slot[index] ^= 0x10
    outcome = target.land(slot)
    expected = "magic" if index < 8 else "version" if index < 10 else "algorithm" if index < 12 else "tag"
    assert isinstance(outcome, Refused)
    assert outcome.check == expected
    assert not any(target.proven())


@pytest.mark.parametrize(("ours", "staged"), [(4, False), (3, False), (4, True)])
def test_every_byte_of_the_content_matters_padding_included(ours: int, *, staged: bool) -> None:
    source = Source()
    target = Target(source, ours, staged=staged)
    clean = source.sealed(2)
    for index in range(SEAL_BYTES, len(clean)):
        slot = clean.copy()
        slot[index] ^= 0x10
        outcome = target.land(slot)
        assert isinstance(outcome, Refused)
        assert outcome.check == "digest"
    assert not any(target.proven())
    target.check_others_untouched()
    assert target.land(clean) == Landed(2, 2)


def test_no_message_shows_a_nonce() -> None:
    source = Source()
    outcome = Target(source).land(source.sealed(0, nonce=b"secret nonce 16."))
    assert isinstance(outcome, Refused)
    assert b"secret nonce 16.".hex() not in outcome.message
    assert source.lease.nonce.hex() not in outcome.message


def test_padding_sealed_with_remains_in_it_is_refused() -> None:
    source = Source()
    target = Target(source)
    slot = source.sealed(2)
    for span in LAYOUT.spans(4):
        slot[SEAL_BYTES + span.offset_bytes + span.num_bytes - 1] = 0x55
    resealed = dirty_seal(slot)
    outcome = target.land(resealed)
    assert isinstance(outcome, Refused)
    assert (outcome.check, "padding" in outcome.message) == ("digest", True)
    assert not any(target.proven())


def dirty_seal(slot: bytearray) -> bytearray:
    """Seal these bytes as they are, as a sender with a fault might."""
    seal = Seal.unpack(slot)
    assert isinstance(seal, Seal)
    digest = xxhash.xxh3_128(slot[SEAL_BYTES:]).digest()
    return bytearray(dataclasses.replace(seal, digest=digest).pack()) + slot[SEAL_BYTES:]


def test_a_block_that_landed_is_refused_the_second_time_and_stays_readable() -> None:
    source = Source()
    target = Target(source, 3)
    assert isinstance(target.land(source.sealed(1)), Landed)
    outcome = target.land(source.sealed(1))
    assert isinstance(outcome, Refused)
    assert outcome.check == "duplicate"
    assert target.proven() == [False] * 4 + [True] * 4 + [False] * 2
    assert target.has(source, 1)
    assert isinstance(target.land(source.sealed(0)), Landed)


def test_a_spoiled_duplicate_does_not_touch_what_landed() -> None:
    source = Source()
    target = Target(source)
    target.land(source.sealed(1))
    slot = source.sealed(1)
    slot[-200] ^= 1
    assert isinstance(target.land(slot), Refused)
    assert target.has(source, 1)


def test_a_refused_block_lies_in_unproven_slots_and_a_good_one_may_follow() -> None:
    source = Source()
    target = Target(source)
    slot = source.sealed(1)
    slot[-1 - 16] ^= 1  # in the last array: all before it have been copied when it is found
    assert isinstance(target.land(slot), Refused)
    assert any(target.storage.read_canonical(target.table, 4, 4))
    with pytest.raises(UnprovenSlot):
        target.ledger.require(SEQUENCE, target.table, 4, 1)
    assert isinstance(target.land(source.sealed(1)), Landed)
    assert target.has(source, 1)


@given(
    st.lists(st.tuples(st.integers(0, 1 << 14), st.binary(min_size=1, max_size=80)), min_size=1, max_size=4), st.data()
)
@settings(max_examples=200, deadline=None)
def test_any_damage_is_refused_or_changes_nothing(damage: list[tuple[int, bytes]], data: st.DataObject) -> None:
    source = Source(block_size=data.draw(st.sampled_from([3, 4, 5])))
    target = Target(source, data.draw(st.sampled_from([3, 4, 5])))
    position = data.draw(st.integers(0, 2))
    clean = source.sealed(position)
    slot = clean.copy()
    for place, noise in damage:
        start = place % len(slot)
        fitting = noise[: len(slot) - start]
        slot[start : start + len(fitting)] = fitting
    outcome = target.land(slot)
    if isinstance(outcome, Landed):
        assert slot == clean
        assert target.has(source, position)
    else:
        assert not any(target.proven())
    target.check_others_untouched()


# -- faults of our own are assertions, before a byte is copied


def test_a_table_that_leads_to_another_sequence_is_an_assertion_and_spoils_nothing() -> None:
    source = Source()
    target = Target(source)
    target.ledger.record_verified(8, target.table[1:2], 0, 4)
    before = target.content()
    with pytest.raises(AssertionError, match="another"):
        target.land(source.sealed(1))
    assert target.content() == before
    target.ledger.readable(8, target.table[1:2], 4)


def test_a_table_that_names_a_block_twice_is_an_assertion() -> None:
    source = Source()
    target = Target(source)
    target.table = (target.table[0], target.table[0], target.table[2])
    assert isinstance(target.land(source.sealed(0)), Landed)
    with pytest.raises(AssertionError):
        target.land(source.sealed(1))
    assert target.has(source, 0)


@pytest.mark.parametrize("table", [(0, 1), (), (0, 1, 99), (0, 1, -1)])
def test_a_table_too_short_or_outside_the_pool_is_an_assertion(table: tuple[int, ...]) -> None:
    source = Source()
    target = Target(source)
    target.table = table
    with pytest.raises(AssertionError):
        target.land(source.sealed(2))


def test_another_pools_ledger_is_an_assertion() -> None:
    source = Source()
    target = Target(source)
    target.ledger = SpoiledLedger(target.ledger.num_blocks, 5)
    with pytest.raises(AssertionError):
        target.land(source.sealed(0))


def test_an_expectation_that_cannot_be_met_is_refused() -> None:
    good = Target(Source()).expectation
    wrong: list[dict[str, Any]] = [
        {"num_tokens": 0},
        {"num_tokens": 13},
        {"lease_id": b"x"},
        {"chains": (b"x",) * 3},
        {"wire_block_size": 0},
    ]
    for changes in wrong:
        with pytest.raises(ValueError, match=r"bytes|blocks|tokens"):
            dataclasses.replace(good, **changes)


def test_the_lease_of_a_block_can_be_looked_up_before_anything_is_verified() -> None:
    slot = Source().sealed(0)
    assert peek_lease(memoryview(slot)) == b"l" * 16
    slot[100] ^= 1
    assert peek_lease(memoryview(slot)) == b"l" * 16
    assert peek_lease(memoryview(bytes(len(slot)))) is None
    assert peek_lease(memoryview(b"")) is None
