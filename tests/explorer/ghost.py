"""Ghost memory: real bytes in real pools whose owner can be told by looking at them, and the runner that reads and writes them.

A promise about memory is judged by these bytes alone. What the code says of itself (ledger, pool, lease book) is only what it claims.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvlease.engine.batch import SequenceStep
from kvlease.engine.errors import EngineFailed
from kvlease.kvcache.canonical import HostWindow, SlotRun
from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.ledger import IntArray, Occupancy, SlotLedger
from kvlease.kvcache.memory import Room
from kvlease.kvcache.pool import BlockHandle
from kvlease.kvcache.seal import sealed_block_bytes
from kvlease.kvcache.storage import KVStorage
from kvlease.sampling.tokens import DrawnToken

BLOCK_SIZE = 2
LAYOUT = attention_layout(1, 1, 1, "float32")  # eight bytes for a token: four of k, four of v
FRAME_BYTES = sealed_block_bytes(LAYOUT, BLOCK_SIZE)
V_OFFSET = LAYOUT.spans(BLOCK_SIZE)[1].offset_bytes
SLOT_BYTES = 4
REMAINS = b"\xee" * SLOT_BYTES  # what an earlier tenant of another time left
ZERO = bytes(SLOT_BYTES)
MAX_ATTEMPTS = 2

Bytes2 = tuple[bytes, bytes]  # of one token slot: k and v


class Broken(Exception):
    """A promise is broken; the text says how."""

    def __init__(self, promise: str, text: str) -> None:
        super().__init__(f"{promise}: {text}")
        self.promise = promise


def require(fact: bool, promise: str, text: str) -> None:
    if not fact:
        raise Broken(promise, text)


def holder_of(request: int, attempt: int) -> int:
    """Ids are a function of who holds, so two states that differ in ids alone are one state."""
    return 1 + request * MAX_ATTEMPTS + attempt - 1


def request_of(holder: int) -> int:
    return (holder - 1) // MAX_ATTEMPTS


def truth(request: int, position: int) -> Bytes2:
    """The KV of one token: who it belongs to stands in it."""
    return bytes((0x10 + request, position + 1, 0xA0, 1)), bytes((0x10 + request, position + 1, 0xB0, 2))


def token_at(request: int, position: int) -> int:
    """The token that the model draws for this position."""
    return 100 + 20 * request + position


_ROOMS: dict[tuple[int, tuple[int, ...]], Room] = {}


def plain(room: Room | None) -> Room | None:
    """The same room without generations, one object for each: a state has no count of what was before."""
    if room is None:
        return None
    name = room.holder, room.table
    if name not in _ROOMS:
        _ROOMS[name] = Room(room.holder, tuple(BlockHandle(block, 0) for block in room.table))
    return _ROOMS[name]


class GhostStorage(KVStorage):
    """The shipped storage, whose bytes can be put back as they were."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(LAYOUT, num_blocks, BLOCK_SIZE)
        self.k, self.v = (self.array(0, name).view(torch.uint8).numpy().reshape(-1) for name in ("k", "v"))
        self.before_settle: Callable[[], None] | None = None

    def save(self) -> bytes:
        return self.k.tobytes() + self.v.tobytes()

    def load(self, saved: bytes) -> None:
        data = np.frombuffer(saved, dtype=np.uint8)
        self.k[:] = data[: len(self.k)]
        self.v[:] = data[len(self.k) :]

    def slot(self, index: int) -> Bytes2:
        part = slice(index * SLOT_BYTES, (index + 1) * SLOT_BYTES)
        return self.k[part].tobytes(), self.v[part].tobytes()

    def write(self, index: int, value: Bytes2) -> None:
        part = slice(index * SLOT_BYTES, (index + 1) * SLOT_BYTES)
        self.k[part], self.v[part] = (np.frombuffer(half, dtype=np.uint8) for half in value)

    def settle(self, window: HostWindow, runs: tuple[SlotRun, ...]) -> None:
        if self.before_settle:
            self.before_settle()
        super().settle(window, runs)


class GhostLedger(SlotLedger):
    """The shipped ledger, whose facts can be put back as they were; `before_copy` comes between a header's check and the copy."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__(num_blocks, BLOCK_SIZE)
        self.before_copy: Callable[[], None] | None = None

    def save(self) -> bytes:
        assert not self._sources, "each request of these worlds asks for one text, which inherits nothing"
        return self._owner.tobytes() + self._position.tobytes() + self._kind.tobytes()

    def load(self, saved: bytes) -> None:
        wide, narrow = self._owner.nbytes, self._kind.nbytes
        shape = self._owner.shape
        self._owner[:] = np.frombuffer(saved[:wide], dtype=np.int64).reshape(shape)
        self._position[:] = np.frombuffer(saved[wide : 2 * wide], dtype=np.int64).reshape(shape)
        self._kind[:] = np.frombuffer(saved[2 * wide : 2 * wide + narrow], dtype=np.int8).reshape(shape)

    def claims(self) -> list[tuple[int, int, int]]:
        """What the ledger says is proven: slot, sequence, position."""
        owners, positions = self._owner.reshape(-1).tolist(), self._position.reshape(-1).tolist()
        return [(slot, owner, positions[slot]) for slot, owner in enumerate(owners) if owner >= 0]

    def begin_write(self, blocks: IntArray, slots: IntArray) -> None:
        super().begin_write(blocks, slots)
        if self.before_copy:
            self.before_copy()


@dataclass(slots=True)
class GhostRunner:
    """Reads and writes as an engine's runner does; judges every byte that it reads. `failing`: requests whose pass fails now."""

    storage: GhostStorage
    ledger: GhostLedger
    failing: frozenset[int] = frozenset()

    def run(self, steps: Sequence[SequenceStep]) -> tuple[tuple[DrawnToken, ...], ...]:
        extents = [(s.context.table, s.context.num_tokens, len(s.token_ids)) for s in steps]
        for step, extent in zip(steps, extents, strict=True):
            found = self.ledger.occupancy(step.context.sequence_id, *extent)
            assert found is not Occupancy.FOREIGN, "a pass would write over another sequence"
        places = [self.ledger.locate(*extent) for extent in extents]
        self.ledger.begin_write(*(np.concatenate(part) for part in zip(*places, strict=True)))
        for step in steps:
            step.context.confirm()
        if any(request_of(step.context.sequence_id) in self.failing for step in steps):
            raise EngineFailed("the pass failed")
        for step, (blocks, slots) in zip(steps, places, strict=True):
            self._one(step, blocks, slots)
        drawn = [DrawnToken(token_at(request_of(s.context.sequence_id), s.num_tokens)) for s in steps]
        return tuple((token,) if step.draws else () for token, step in zip(drawn, steps, strict=True))

    def _one(self, step: SequenceStep, blocks: IntArray, slots: IntArray) -> None:
        request, first = request_of(step.context.sequence_id), step.context.num_tokens
        for offset, (block, slot) in enumerate(zip(blocks.tolist(), slots.tolist(), strict=True)):
            self.storage.write(block * BLOCK_SIZE + slot, truth(request, first + offset))
        self._read(step, request)
        positions = np.arange(first, step.num_tokens)
        self.ledger.record_computed(step.context.sequence_id, blocks, slots, positions)

    def _read(self, step: SequenceStep, request: int) -> None:
        """Attention reads every slot of every block that it touches, masked or not."""
        table, own = step.context.table, {truth(request, position) for position in range(16)}
        for position in range(-(-step.num_tokens // BLOCK_SIZE) * BLOCK_SIZE):
            found = self.storage.slot(table[position // BLOCK_SIZE] * BLOCK_SIZE + position % BLOCK_SIZE)
            if position < step.num_tokens:
                right = found == truth(request, position)
                require(right, "P1", f"request {request} reads {found} as its position {position}")
            else:
                require(found == (ZERO, ZERO) or found in own, "P8", f"request {request} reads {found} behind its mask")
