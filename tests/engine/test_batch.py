"""Facts of packing."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.engine.batch import PackedBatch, SequenceStep, pack
from kvlease.kvcache.ledger import SlotLedger

NUM_BLOCKS = 64


def step_of(ledger: SlotLedger, sequence_id: int, table: tuple[int, ...], old: int, new: int) -> SequenceStep:
    ledger.clear(table)
    if old:
        blocks, slots = ledger.locate(table, 0, old)
        ledger.record_computed(sequence_id, blocks, slots, np.arange(old))
    return SequenceStep(ledger.readable(sequence_id, table, old), tuple(range(new)))


def packed(block_size: int, *parts: tuple[tuple[int, ...], int, int]) -> PackedBatch:
    ledger = SlotLedger(NUM_BLOCKS, block_size)
    return pack([step_of(ledger, i, *part) for i, part in enumerate(parts)], block_size)


def test_every_new_token_goes_where_the_block_table_says() -> None:
    batch = packed(4, ((9, 3), 3, 4), ((5, 6, 1), 8, 1), ((2,), 0, 2))
    assert batch.token_ids.tolist() == [0, 1, 2, 3, 0, 0, 1]
    assert batch.positions.tolist() == [3, 4, 5, 6, 8, 0, 1]
    assert batch.blocks.tolist() == [9, 3, 3, 3, 1, 2, 2]
    assert batch.slots.tolist() == [3, 0, 1, 2, 0, 0, 1]
    assert [(s.first, s.last, s.num_tokens) for s in batch.sequences] == [(0, 4, 7), (4, 5, 9), (5, 7, 2)]


@given(data=st.data(), block_size=st.integers(1, 9))
def test_destinations_are_those_of_the_ledger(data: st.DataObject, block_size: int) -> None:
    free = data.draw(st.permutations(range(NUM_BLOCKS)))
    parts, used = [], 0
    for _ in range(data.draw(st.integers(1, 5))):
        old, new = data.draw(st.integers(0, 3 * block_size)), data.draw(st.integers(1, 3 * block_size))
        num_blocks = -(-(old + new) // block_size) + data.draw(st.integers(0, 1))
        parts.append((tuple(free[used : used + num_blocks]), old, new))
        used += num_blocks
    batch = packed(block_size, *parts)
    ledger = SlotLedger(NUM_BLOCKS, block_size)
    located = [ledger.locate(table, old, new) for table, old, new in parts]
    assert batch.blocks.tolist() == np.concatenate([blocks for blocks, _ in located]).tolist()
    assert batch.slots.tolist() == np.concatenate([slots for _, slots in located]).tolist()


@pytest.mark.parametrize(
    ("table", "is_consecutive"),
    [((4,), True), ((4, 5, 6), True), ((4, 6, 5), False), ((6, 5, 4), False), ((4, 4), False)],
)
def test_only_ascending_neighbours_are_consecutive(table: tuple[int, ...], is_consecutive: bool) -> None:
    (sequence,) = packed(4, (table, 0, 4 * len(table))).sequences
    assert sequence.is_consecutive == is_consecutive


def test_blocks_beyond_the_tokens_do_not_count() -> None:
    (sequence,) = packed(4, ((4, 5, 60, 2), 0, 8)).sequences
    assert sequence.is_consecutive
    assert sequence.table.tolist() == [4, 5]


def test_a_table_without_room_is_refused() -> None:
    with pytest.raises(AssertionError, match="9 tokens in 2 blocks of 4"):
        packed(4, ((4, 5), 5, 4))


def test_a_step_without_tokens_is_refused() -> None:
    with pytest.raises(AssertionError, match="without tokens"):
        packed(4, ((4, 5), 5, 0))


def test_a_pass_without_steps_is_refused() -> None:
    with pytest.raises(AssertionError, match="at least one step"):
        pack([], 16)
