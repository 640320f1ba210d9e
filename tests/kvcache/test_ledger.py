"""The ledger: a slot is readable only for the sequence and position that it was proven for."""

from __future__ import annotations

import dataclasses
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.ledger import ComputedBlocks, Occupancy, ReadableBlocks, SlotLedger

NUM_BLOCKS, BLOCK_SIZE = 8, 4
TABLE = (5, 2, 3)


def compute(ledger: SlotLedger, sequence_id: int, table: tuple[int, ...], first: int, num_tokens: int) -> None:
    blocks, slots = ledger.locate(table, first, num_tokens)
    ledger.begin_write(blocks, slots)
    ledger.record_computed(sequence_id, blocks, slots, np.arange(first, first + num_tokens))


def verify(ledger: SlotLedger, sequence_id: int, table: tuple[int, ...], first: int, num_tokens: int) -> None:
    ledger.begin_write(*ledger.locate(table, first, num_tokens))
    ledger.record_verified(sequence_id, table, first, num_tokens)


@pytest.fixture
def ledger() -> SlotLedger:
    return SlotLedger(NUM_BLOCKS, BLOCK_SIZE)


def test_nothing_is_readable_at_first(ledger: SlotLedger) -> None:
    with pytest.raises(
        UnprovenSlot, match=r"block 5 slot 0 is not proven for sequence 7 at position 0: it is unproven"
    ):
        ledger.readable(7, TABLE, 1)
    assert ledger.readable(7, TABLE, 0).num_tokens == 0


def test_verified_and_computed_slots_are_readable_together(ledger: SlotLedger) -> None:
    verify(ledger, 7, TABLE, 0, 6)
    compute(ledger, 7, TABLE, 6, 3)
    readable = ledger.readable(7, TABLE, 9)
    assert (readable.sequence_id, readable.table, readable.num_tokens) == (7, TABLE, 9)
    with pytest.raises(UnprovenSlot, match=r"block 3 slot 1 .* position 9: it is unproven"):
        ledger.readable(7, TABLE, 10)


def test_only_a_forward_pass_makes_computed_blocks(ledger: SlotLedger) -> None:
    compute(ledger, 7, TABLE, 0, 6)
    verify(ledger, 7, TABLE, 6, 1)
    assert ledger.computed(7, TABLE, 6).num_tokens == 6
    with pytest.raises(
        UnprovenSlot, match=r"block 2 slot 2 is not computed here .* verified for sequence 7 at position 6"
    ):
        ledger.computed(7, TABLE, 7)


def test_another_sequence_cannot_read_them_and_is_told_the_owner(ledger: SlotLedger) -> None:
    compute(ledger, 7, TABLE, 0, 12)
    with pytest.raises(UnprovenSlot, match=r"block 5 slot 0 .* sequence 8 .* computed for sequence 7 at position 0"):
        ledger.readable(8, TABLE, 1)


def test_a_table_in_the_wrong_order_is_not_readable(ledger: SlotLedger) -> None:
    compute(ledger, 7, TABLE, 0, 12)
    for table in ((2, 5, 3), (5, 5, 3), (5, 3, 2)):
        with pytest.raises(UnprovenSlot):
            ledger.readable(7, table, 12)


def test_one_wrong_slot_in_the_middle_is_found(ledger: SlotLedger) -> None:
    compute(ledger, 7, TABLE, 0, 12)
    ledger.begin_write(np.array([2]), np.array([1]))
    ledger.readable(7, TABLE, 5)
    with pytest.raises(UnprovenSlot, match="block 2 slot 1"):
        ledger.readable(7, TABLE, 12)


def test_clearing_blocks_unproves_all_of_their_slots(ledger: SlotLedger) -> None:
    compute(ledger, 7, TABLE, 0, 12)
    ledger.clear([2])
    ledger.readable(7, TABLE, 4)
    with pytest.raises(UnprovenSlot, match="block 2 slot 0"):
        ledger.readable(7, TABLE, 5)
    ledger.clear([])


def test_a_table_that_is_too_short_proves_nothing(ledger: SlotLedger) -> None:
    compute(ledger, 7, TABLE, 0, 12)
    with pytest.raises(UnprovenSlot, match="position 12 lies beyond a table of 3 blocks"):
        ledger.readable(7, TABLE, 13)


@pytest.mark.parametrize("table", [(-1,), (NUM_BLOCKS,), (-NUM_BLOCKS,)])
def test_blocks_outside_the_pool_are_an_assertion(ledger: SlotLedger, table: tuple[int, ...]) -> None:
    with pytest.raises(AssertionError):
        ledger.readable(7, table, 1)
    with pytest.raises(AssertionError):
        ledger.record_verified(7, table, 0, 1)
    with pytest.raises(AssertionError):
        ledger.clear(table)
    with pytest.raises(AssertionError):
        ledger.begin_write(np.array(table), np.array([0]))
    with pytest.raises(AssertionError):
        ledger.begin_write(np.array([0]), np.array([-1]))


def test_what_was_not_begun_cannot_be_proven_again(ledger: SlotLedger) -> None:
    compute(ledger, 7, TABLE, 0, 4)
    blocks, slots = ledger.locate(TABLE, 3, 2)
    with pytest.raises(AssertionError, match="not begun"):
        ledger.record_computed(8, blocks, slots, np.array([3, 4]))
    with pytest.raises(AssertionError, match="not begun"):
        ledger.record_verified(7, TABLE, 0, 4)
    ledger.readable(7, TABLE, 4)


def test_two_tokens_for_one_slot_in_one_pass_are_an_assertion(ledger: SlotLedger) -> None:
    with pytest.raises(AssertionError, match="same slot"):
        ledger.begin_write(np.array([1, 2, 1]), np.array([3, 3, 3]))


def test_proofs_can_be_made_by_a_ledger_alone(ledger: SlotLedger) -> None:
    for proof in (ReadableBlocks, ComputedBlocks):
        with pytest.raises(TypeError):
            proof(7, TABLE, 4, ledger, object())
    compute(ledger, 7, TABLE, 0, 4)
    real = ledger.readable(7, TABLE, 4)
    with pytest.raises((TypeError, ValueError)):
        dataclasses.replace(real, num_tokens=12)  # type: ignore[call-arg]
    with pytest.raises(dataclasses.FrozenInstanceError):
        real.num_tokens = 12  # type: ignore[misc]


def test_a_proof_can_be_confirmed_until_its_blocks_change(ledger: SlotLedger) -> None:
    compute(ledger, 7, TABLE, 0, 8)
    readable, computed = ledger.readable(7, TABLE, 8), ledger.computed(7, TABLE, 8)
    readable.confirm()
    computed.confirm(4, 4)
    ledger.clear([2])
    computed.confirm(0, 4)
    with pytest.raises(UnprovenSlot):
        readable.confirm()
    with pytest.raises(UnprovenSlot):
        computed.confirm(4, 1)


def test_occupancy_tells_own_slots_from_foreign_ones(ledger: SlotLedger) -> None:
    assert ledger.occupancy(7, TABLE, 0, 12) is Occupancy.VACANT
    verify(ledger, 7, TABLE, 4, 4)
    assert ledger.occupancy(7, TABLE, 0, 4) is Occupancy.VACANT
    assert ledger.occupancy(7, TABLE, 0, 12) is Occupancy.OWN
    assert ledger.occupancy(8, TABLE, 4, 1) is Occupancy.FOREIGN
    assert ledger.occupancy(7, (2,), 0, 4) is Occupancy.FOREIGN


def test_a_caller_cannot_change_a_proof_through_its_table(ledger: SlotLedger) -> None:
    compute(ledger, 7, TABLE, 0, 12)
    table = list(TABLE)
    readable = ledger.readable(7, table, 12)
    table[0] = 0
    assert readable.table == TABLE


operations = st.lists(
    st.tuples(
        st.sampled_from(["compute", "verify", "clear", "begin"]),
        st.integers(0, 2),
        st.permutations(range(4)).map(lambda table: tuple(table[:2])),
        st.integers(0, 5),
        st.integers(1, 3),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_readable_agrees_with_a_dictionary_of_slots(history: list[tuple[str, int, tuple[int, ...], int, int]]) -> None:
    ledger = SlotLedger(4, 3)
    model: dict[tuple[int, int], tuple[int, int, str]] = {}
    for what, sequence_id, table, first, num_tokens in history:
        count = min(num_tokens, 6 - first)
        places = [(table[p // 3], p % 3, p) for p in range(first, first + count)]
        if what == "clear":
            ledger.clear(table)
            model = {place: fact for place, fact in model.items() if place[0] not in table}
            continue
        for block, slot, _ in places:
            model.pop((block, slot), None)
        if what == "begin":
            ledger.begin_write(*ledger.locate(table, first, count))
            continue
        (compute if what == "compute" else verify)(ledger, sequence_id, table, first, count)
        model.update({(block, slot): (sequence_id, p, what) for block, slot, p in places})
    for sequence_id in range(3):
        for table in ((0, 1), (1, 0), (2, 3), (3, 1)):
            facts = [model.get((table[p // 3], p % 3)) for p in range(6)]
            for num_tokens in range(7):
                wanted = facts[:num_tokens]
                can_read = all(f and f[:2] == (sequence_id, p) for p, f in enumerate(wanted))
                is_computed = can_read and all(f and f[2] == "compute" for f in wanted)
                assert proves(ledger.readable, sequence_id, table, num_tokens) == can_read
                assert proves(ledger.computed, sequence_id, table, num_tokens) == is_computed


def proves(check: object, sequence_id: int, table: tuple[int, ...], num_tokens: int) -> bool:
    assert callable(check)
    try:
        check(sequence_id, table, num_tokens)
    except UnprovenSlot:
        return False
    return True


def test_sixteen_sequences_of_1024_tokens_are_proven_in_well_under_a_millisecond() -> None:
    ledger = SlotLedger(16 * 64, 16)
    tables = [tuple(range(index, 16 * 64, 16)) for index in range(16)]
    for sequence_id, table in enumerate(tables):
        compute(ledger, sequence_id, table, 0, 1024)

    def prove() -> float:
        start = time.perf_counter()
        for sequence_id, table in enumerate(tables):
            ledger.readable(sequence_id, table, 1024)
        return time.perf_counter() - start

    assert min(prove() for _ in range(50)) < 1e-3
