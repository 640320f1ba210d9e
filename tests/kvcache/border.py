"""Two pools and the border between them, for tests: a sender with a computed prompt, a receiver that can be interrupted.

Never: patches what it tests; the interruptions come through subclasses that are passed in.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch

from kvlease.kvcache.canonical import HostWindow, SlotRun
from kvlease.kvcache.departure import DepartureLease, seal_block
from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.landing import Expectation, Landed, Refused, land_block
from kvlease.kvcache.layout import Layout, attention_layout
from kvlease.kvcache.ledger import IntArray, SlotLedger
from kvlease.kvcache.seal import SEAL_BYTES, Seal, chain_hashes, sealed_block_bytes
from kvlease.kvcache.storage import KVStorage

LAYOUT = attention_layout(2, 2, 3, "float32")
TOKENS = tuple(range(100, 110))
REMAINS = 0xEE  # what an earlier tenant left in the receiving pool
SEQUENCE = 7


class Source:
    """A sender's pool with one computed prompt."""

    def __init__(
        self,
        layout: Layout = LAYOUT,
        block_size: int = 4,
        tokens: Sequence[int] = TOKENS,
        wire: int = 4,
        *,
        staged: bool = False,
    ) -> None:
        num_blocks = -(-len(tokens) // block_size) + 3
        self.storage = KVStorage(layout, num_blocks, block_size, staged=staged)
        generator = torch.Generator().manual_seed(3)
        for layer, specs in enumerate(layout.layers):
            for spec in specs:
                self.storage.array(layer, spec.name).view(torch.uint8).random_(0, 256, generator=generator)
        self.table = tuple(random.Random(5).sample(range(num_blocks), num_blocks - 3))
        self.num_tokens = len(tokens)
        ledger = SlotLedger(num_blocks, block_size)
        blocks, slots = ledger.locate(self.table, 0, self.num_tokens)
        ledger.begin_write(blocks, slots)
        ledger.record_computed(1, blocks, slots, np.arange(self.num_tokens))
        self.computed = ledger.computed(1, self.table, self.num_tokens)
        chains = chain_hashes(tokens, wire)
        self.lease = DepartureLease(b"l" * 16, b"n" * 16, layout.fingerprint(b"m" * 16), chains, wire)

    @property
    def num_blocks(self) -> int:
        return len(self.lease.chains)

    def sealed(self, block: int, **changes: Any) -> bytearray:
        slot = bytearray(sealed_block_bytes(self.storage.layout, self.lease.wire_block_size))
        seal_block(self.storage, self.computed, dataclasses.replace(self.lease, **changes), block, memoryview(slot))
        return slot

    def resealed(self, block: int, **changes: Any) -> bytearray:
        """A block under a good tag that claims something else."""
        slot = self.sealed(block)
        seal = Seal.unpack(slot)
        assert isinstance(seal, Seal)
        slot[:SEAL_BYTES] = dataclasses.replace(seal, **changes).pack()
        return slot


class Target:
    """A receiver's pool full of an earlier tenant's remains, and a table of scrubbed blocks in it."""

    def __init__(self, source: Source, block_size: int = 4, *, staged: bool = False) -> None:
        lease, tokens = source.lease, source.num_tokens
        num_blocks = -(-tokens // block_size) + 3
        self.storage = SpoiledStorage(source.storage.layout, num_blocks, block_size, staged=staged)
        self.ledger = SpoiledLedger(num_blocks, block_size)
        self.table = tuple(random.Random(9).sample(range(num_blocks), num_blocks - 3))
        self.others = tuple(block for block in range(num_blocks) if block not in self.table)
        for layer, specs in enumerate(source.storage.layout.layers):
            for spec in specs:
                self.storage.array(layer, spec.name).view(torch.uint8).fill_(REMAINS)
        self.storage.scrub(self.table)
        self.ledger.clear(self.table)
        self.expectation = Expectation(
            lease.lease_id, lease.nonce, lease.fingerprint, lease.chains, tokens, lease.wire_block_size
        )

    def land(self, slot: bytes | bytearray | memoryview) -> Landed | Refused:
        return land_block(self.storage, self.ledger, SEQUENCE, self.table, self.expectation, memoryview(slot))

    def content(self) -> bytes:
        return bytes(self.storage.read_canonical(self.table, 0, self.expectation.num_tokens))

    def has(self, source: Source, position: int) -> bool:
        wire = source.lease.wire_block_size
        extent = (position * wire, self.expectation.num_valid(position))
        mine = self.storage.read_canonical(self.table, *extent)
        return mine == source.storage.read_canonical(source.table, *extent)

    def proven(self) -> list[bool]:
        """Which positions are readable, whatever is before them."""
        return [self._is_proven(position) for position in range(self.expectation.num_tokens)]

    def _is_proven(self, position: int) -> bool:
        try:
            self.ledger.require(SEQUENCE, self.table, position, 1)
        except UnprovenSlot:
            return False
        return True

    def check_others_untouched(self) -> None:
        size = self.storage.block_size
        for block in self.others:
            content = self.storage.read_canonical((block,), 0, size)
            spans = self.storage.layout.spans(size)
            assert all(set(content[s.offset_bytes : s.offset_bytes + s.num_bytes]) == {REMAINS} for s in spans)


class SpoiledArrays(Sequence[memoryview]):
    """Runs an action when the copy comes to each array."""

    def __init__(self, arrays: Sequence[memoryview], actions: dict[int, Callable[[], None]]) -> None:
        self._arrays, self._actions = arrays, actions

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: int) -> memoryview:  # type: ignore[override]
        return self._arrays[index]

    def __iter__(self) -> Iterator[memoryview]:
        for index, array in enumerate(self._arrays):
            self._actions.get(index, nothing)()
            yield array


class SpoiledStorage(KVStorage):
    """A storage whose landing can be interrupted."""

    during: dict[int, Callable[[], None]] = {}  # noqa: RUF012
    after_digest: Callable[[], None] | None = None

    def write_window(self, runs: tuple[SlotRun, ...]) -> HostWindow:
        window = super().write_window(runs)
        return dataclasses.replace(window, arrays=SpoiledArrays(window.arrays, self.during))

    def settle(self, window: HostWindow, runs: tuple[SlotRun, ...]) -> None:
        if self.after_digest:
            self.after_digest()
        super().settle(window, runs)


class SpoiledLedger(SlotLedger):
    """A ledger whose landing can be interrupted between the decision about the header and the copy of the content."""

    before_copy: Callable[[], None] | None = None

    def begin_write(self, blocks: IntArray, slots: IntArray) -> None:
        super().begin_write(blocks, slots)
        if self.before_copy:
            self.before_copy()


def nothing() -> None: ...
