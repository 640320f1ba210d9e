"""Departure: only what this engine computed is sealed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from kvlease.kvcache.canonical import HostWindow, SlotRun
from kvlease.kvcache.departure import DepartureLease, seal_block
from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.ledger import ComputedBlocks, SlotLedger
from kvlease.kvcache.seal import SEAL_BYTES, Seal, SealFault, chain_hashes, sealed_block_bytes
from kvlease.kvcache.storage import KVStorage

LAYOUT = attention_layout(2, 2, 4, "float32")
NUM_TOKENS, WIRE, TABLE = 10, 4, (4, 1, 3)
LEASE = DepartureLease(b"l" * 16, b"n" * 16, b"f" * 16, chain_hashes(range(NUM_TOKENS), WIRE), WIRE)


class Prefill:
    """A pool in which one prompt was computed. `interrupt` runs in the middle of each copy out."""

    def __init__(self, num_tokens: int = NUM_TOKENS) -> None:
        self.ledger = SlotLedger(6, 4)
        self.storage = InterruptedStorage(self)
        for layer in range(2):
            for name in ("k", "v"):
                self.storage.array(layer, name).uniform_()
        blocks, slots = self.ledger.locate(TABLE, 0, num_tokens)
        self.ledger.begin_write(blocks, slots)
        self.ledger.record_computed(1, blocks, slots, np.arange(num_tokens))
        self.num_tokens = num_tokens

    def computed(self) -> ComputedBlocks:
        return self.ledger.computed(1, TABLE, self.num_tokens)

    def interrupt(self) -> None: ...


class InterruptedStorage(KVStorage):
    def __init__(self, prefill: Prefill) -> None:
        super().__init__(LAYOUT, 6, 4)
        self.prefill = prefill

    def read_window(self, runs: tuple[SlotRun, ...]) -> HostWindow:
        self.prefill.interrupt()
        return super().read_window(runs)


def slot() -> memoryview:
    return memoryview(bytearray(b"\xaa" * (sealed_block_bytes(LAYOUT, WIRE) + 64)))


@pytest.mark.parametrize(("position", "num_valid"), [(0, 4), (1, 4), (2, 2)])
def test_a_sealed_block_is_seal_and_canonical_content(position: int, num_valid: int) -> None:
    prefill, target = Prefill(), slot()
    num_bytes = seal_block(prefill.storage, prefill.computed(), LEASE, position, target)
    assert num_bytes == sealed_block_bytes(LAYOUT, WIRE)
    content = target[SEAL_BYTES:num_bytes]
    assert content == prefill.storage.read_canonical(TABLE, position * WIRE, num_valid, WIRE)
    assert Seal.unpack(target) == Seal(
        LEASE.lease_id,
        LEASE.nonce,
        position,
        num_valid,
        LEASE.fingerprint,
        LEASE.chains[position],
        xxhash.xxh3_128(content).digest(),
    )
    assert set(target[num_bytes:]) == {0xAA}


def test_a_block_that_is_not_computed_to_its_end_is_an_assertion() -> None:
    prefill = Prefill(num_tokens=6)
    seal_block(prefill.storage, prefill.computed(), LEASE, 0, slot())
    for position in (1, 2, 3, -1):
        with pytest.raises(AssertionError):
            seal_block(prefill.storage, prefill.computed(), LEASE, position, slot())


def test_verified_tokens_are_not_sealed_as_computed_ones() -> None:
    prefill = Prefill(num_tokens=4)
    prefill.ledger.record_verified(1, TABLE, 4, 4)
    prefill.num_tokens = 8
    with pytest.raises(UnprovenSlot):
        prefill.computed()


def test_a_proof_older_than_its_blocks_leaves_no_seal_and_copies_nothing() -> None:
    prefill, target = Prefill(), slot()
    computed = prefill.computed()
    seal_block(prefill.storage, computed, LEASE, 0, target)
    content = bytes(target[SEAL_BYTES:])
    prefill.ledger.clear(TABLE)
    with pytest.raises(UnprovenSlot):
        seal_block(prefill.storage, computed, LEASE, 1, target)
    assert isinstance(Seal.unpack(target), SealFault)
    assert target[SEAL_BYTES:] == content


def test_blocks_that_change_hands_during_the_copy_leave_no_seal() -> None:
    class Robbed(Prefill):
        def interrupt(self) -> None:
            self.ledger.clear(TABLE)
            blocks, slots = self.ledger.locate(TABLE, 0, 10)
            self.ledger.record_computed(2, blocks, slots, np.arange(10))

    prefill, target = Robbed(), slot()
    with pytest.raises(UnprovenSlot, match="computed for sequence 2"):
        seal_block(prefill.storage, prefill.computed(), LEASE, 1, target)
    assert isinstance(Seal.unpack(target), SealFault)


def test_a_slot_that_is_too_small_is_an_assertion() -> None:
    prefill = Prefill()
    with pytest.raises(AssertionError):
        seal_block(prefill.storage, prefill.computed(), LEASE, 0, slot()[: SEAL_BYTES + 64])


def test_a_staged_storage_seals_the_same_bytes() -> None:
    prefill, staged = Prefill(), KVStorage(LAYOUT, 6, 4, staged=True)
    for layer in range(2):
        for name in ("k", "v"):
            staged.array(layer, name).copy_(prefill.storage.array(layer, name))
    first, second = slot(), slot()
    seal_block(prefill.storage, prefill.computed(), LEASE, 2, first)
    seal_block(staged, prefill.computed(), LEASE, 2, second)
    assert first == second
    assert torch.equal(staged.array(0, "k"), prefill.storage.array(0, "k"))
