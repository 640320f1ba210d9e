"""Several texts of one prompt: its whole blocks are shared, what is appended to is each one's own, and nobody reads what is not its own."""

from __future__ import annotations

import pytest
import torch

from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.memory import KVMemory, Room
from kvlease.kvcache.pool import BlockPool
from kvlease.kvcache.sizing import choice_blocks
from kvlease.kvcache.storage import KVStorage

BLOCK_SIZE, NUM_BLOCKS, MAX_TOKENS = 4, 16, 6


def memory_of() -> KVMemory:
    layout = attention_layout(num_layers=2, num_kv_heads=1, head_dim=4, dtype="float32")
    storage = KVStorage(layout, NUM_BLOCKS, BLOCK_SIZE)
    for layer in range(2):
        for name in "kv":
            storage.array(layer, name).fill_(float("nan"))  # what earlier tenants have left
    return KVMemory(BlockPool(NUM_BLOCKS), SlotLedger(NUM_BLOCKS, BLOCK_SIZE), storage)


def arrived(kv: KVMemory, num_tokens: int) -> Room:
    """Room with a prompt that has landed."""
    room = kv.hold(choice_blocks(num_tokens, MAX_TOKENS, 1, BLOCK_SIZE)[0])
    assert room is not None
    kv.scrub(room)
    for layer in range(2):
        for name in "kv":
            slots = kv.storage.array(layer, name).flatten(0, 1)
            for position in range(num_tokens):
                slots[room.table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE] = 100 * layer + position
    kv.ledger.record_verified(room.holder, room.table, 0, num_tokens)
    kv.pool.publish(room.holder, room.handles[: -(-num_tokens // BLOCK_SIZE)])
    return room


def branched(kv: KVMemory, source: Room, num_tokens: int) -> Room:
    own = kv.hold(choice_blocks(num_tokens, MAX_TOKENS, 2, BLOCK_SIZE)[1])
    assert own is not None
    branch = kv.branch(source, own, num_tokens)
    kv.fill_branch(source, branch, num_tokens)
    return branch


@pytest.mark.parametrize("num_tokens", [1, 3, 4, 5, 8, 11])
def test_a_branch_reads_the_prompt_and_has_room_of_its_own_for_the_rest(num_tokens: int) -> None:
    kv = memory_of()
    source = arrived(kv, num_tokens)
    branch = branched(kv, source, num_tokens)
    num_shared = num_tokens // BLOCK_SIZE
    assert branch.table[:num_shared] == source.table[:num_shared]
    assert not {*branch.table[num_shared:]} & {*source.table}
    assert len(branch.table) == len(source.table)
    assert kv.ledger.readable(branch.holder, branch.table, num_tokens)
    with pytest.raises(UnprovenSlot):
        kv.ledger.readable(branch.holder, branch.table, num_tokens + 1)
    assert kv.storage.read_canonical(branch.table, 0, num_tokens) == kv.storage.read_canonical(
        source.table, 0, num_tokens
    )
    for layer in range(2):
        own = kv.storage.array(layer, "v")[list(branch.table[num_shared:])]
        assert torch.isfinite(own).all(), "nothing of an earlier tenant is left"
    kv.pool.check()


def test_only_whole_blocks_are_shared_so_nobody_appends_to_what_another_reads() -> None:
    kv = memory_of()
    source = arrived(kv, 6)
    branch = branched(kv, source, 6)
    assert [kv.pool.is_shared(handle) for handle in source.handles[:2]] == [True, False]
    blocks, slots = kv.ledger.locate(branch.table, 6, 1)
    kv.ledger.begin_write(blocks, slots)
    assert kv.ledger.readable(source.holder, source.table, 6)
    assert source.table[1] not in blocks


@pytest.mark.parametrize("is_source_first", [True, False])
def test_each_text_frees_its_own_and_the_last_one_the_shared_blocks(is_source_first: bool) -> None:
    kv = memory_of()
    source = arrived(kv, 9)
    branch = branched(kv, source, 9)
    first, last = (source, branch) if is_source_first else (branch, source)
    kv.free(first)
    assert kv.ledger.readable(last.holder, last.table, 9)
    assert kv.counts().total - kv.counts().free == len(last.table)
    kv.free(last)
    assert kv.counts().free == NUM_BLOCKS
    kv.pool.check()


def test_an_inheritance_ends_with_its_holder_and_not_while_a_thread_reads_by_it() -> None:
    kv = memory_of()
    source = arrived(kv, 8)
    branch = branched(kv, source, 8)
    kv.pin((branch,))
    kv.free(branch)
    assert kv.ledger.readable(branch.holder, branch.table, 8)
    kv.unpin((branch,))
    with pytest.raises(UnprovenSlot):
        kv.ledger.readable(branch.holder, branch.table, 8)


def test_a_branch_reads_nothing_that_its_source_wrote_after_the_prompt() -> None:
    kv = memory_of()
    source = arrived(kv, 4)
    branch = branched(kv, source, 4)
    kv.ledger.record_verified(source.holder, source.table, 4, 1)
    with pytest.raises(UnprovenSlot):
        kv.ledger.readable(branch.holder, (*branch.table[:1], *source.table[1:]), 5)


def test_what_is_not_proven_for_the_source_is_inherited_by_nobody() -> None:
    kv = memory_of()
    source = arrived(kv, 8)
    own = kv.hold(4)
    assert own is not None
    kv.ledger.begin_write(*kv.ledger.locate(source.table, 2, 1))
    with pytest.raises(UnprovenSlot):
        kv.branch(source, own, 8)


def test_what_is_not_proven_for_the_source_is_not_proven_by_a_copy() -> None:
    kv = memory_of()
    source = arrived(kv, 6)
    own = kv.hold(4)
    assert own is not None
    branch = kv.branch(source, own, 6)
    kv.ledger.begin_write(*kv.ledger.locate(source.table, 5, 1))
    with pytest.raises(UnprovenSlot):
        kv.fill_branch(source, branch, 6)


def test_the_sizes_of_choices() -> None:
    assert choice_blocks(10, 6, 1, 4) == (4,)
    assert choice_blocks(10, 6, 3, 4) == (4, 2, 2)
    assert choice_blocks(8, 8, 2, 4) == (4, 2)
    assert choice_blocks(3, 1, 2, 4) == (1, 1)
