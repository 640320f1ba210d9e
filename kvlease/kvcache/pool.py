"""The blocks of a private pool: who may use which, and in which state each is.

    free ──reserve──▶ reserved (a count) ──take──▶ filling ──publish──▶ readable ──release of the last holder──▶ free
                           └──────────────── release ─────────┴─────────────────────────────────────────────────┘

A generation grows each time a block becomes free, and a handle names block and generation, so a handle that was kept
too long is found out. A pinned holder is one that a local thread works on: its blocks become free at the last unpin,
and nothing else ever stands between a release and free memory.

Never: reads a clock, draws a random number, touches the memory of a block, or lets anybody but a holder free one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NewType

from kvlease.kvcache.errors import UnknownHolder
from kvlease.kvcache.limits import DEFAULT_LIMITS

HolderId = NewType("HolderId", int)


@dataclass(frozen=True, slots=True)
class BlockHandle:
    """A block at one of its generations."""

    block: int
    generation: int


@dataclass(frozen=True, slots=True)
class PoolCounts:
    """Blocks by state. `free` leaves out what is reserved, so the four sum to `total`."""

    free: int
    reserved: int
    filling: int
    readable: int
    total: int


@dataclass(slots=True)
class _Holding:
    """What one holder has. `is_released`: it is gone, and only its pins keep the blocks."""

    num_reserved: int = 0
    num_pins: int = 0
    is_released: bool = False
    blocks: list[int] = field(default_factory=list)

    def copy(self) -> _Holding:
        return _Holding(self.num_reserved, self.num_pins, self.is_released, self.blocks.copy())

    def key(self) -> tuple[int, int, bool, tuple[int, ...]]:
        return self.num_reserved, self.num_pins, self.is_released, tuple(self.blocks)


class BlockPool:
    """A plain value: `copy()`, `==` and `key()` cost microseconds for a small pool. Misuse is an `AssertionError`."""

    __slots__ = ("_filling", "_free", "_generations", "_holdings", "_num_reserved", "_readable")
    __hash__ = None  # type: ignore[assignment]  # it changes; `key()` is the hashable snapshot

    def __init__(self, num_blocks: int) -> None:
        """All of `num_blocks` blocks are free."""
        if num_blocks <= 0:
            raise ValueError(f"a pool needs blocks, got {num_blocks}")
        self._generations = [0] * num_blocks
        self._free = list(range(num_blocks))  # sorted; some of them are spoken for by reservations
        self._num_reserved = 0
        self._filling: dict[int, HolderId] = {}
        self._readable: dict[int, frozenset[HolderId]] = {}
        self._holdings: dict[HolderId, _Holding] = {}

    # -- a holder's life

    def reserve(self, holder: HolderId, num_blocks: int) -> bool:
        """Promise `num_blocks` more blocks to `holder`, all or nothing. `False`: no room, and nothing has changed."""
        assert num_blocks >= 0, f"a reservation of {num_blocks} blocks"
        assert not self._is_released(holder), f"holder {holder} was released"
        if num_blocks > len(self._free) - self._num_reserved:
            return False
        self._holdings.setdefault(holder, _Holding()).num_reserved += num_blocks
        self._num_reserved += num_blocks
        return True

    def take(self, holder: HolderId, num_blocks: int) -> tuple[BlockHandle, ...]:
        """Turn `num_blocks` reserved blocks into filling ones: the lowest consecutive run, else the lowest ones.

        Their memory holds whatever was left in it: the caller scrubs it before anything may read.
        """
        holding = self._live(holder)
        assert 0 < num_blocks <= holding.num_reserved, (
            f"holder {holder} takes {num_blocks} of {holding.num_reserved} reserved blocks"
        )
        first = self._find_run(num_blocks)
        blocks = self._free[first : first + num_blocks]
        del self._free[first : first + num_blocks]
        holding.num_reserved -= num_blocks
        self._num_reserved -= num_blocks
        holding.blocks.extend(blocks)
        self._filling.update(dict.fromkeys(blocks, holder))
        return tuple(BlockHandle(block, self._generations[block]) for block in blocks)

    def publish(self, holder: HolderId, handles: Iterable[BlockHandle]) -> None:
        """Turn filling blocks of `holder` into readable ones; no further holder may read them before."""
        self._live(holder)
        for block in self._current(handles):
            assert self._filling.get(block) == holder, f"block {block} is not being filled by holder {holder}"
            del self._filling[block]
            self._readable[block] = frozenset((holder,))

    def share(self, source_holder: HolderId, target_holder: HolderId, handles: Iterable[BlockHandle]) -> None:
        """Make `target_holder` (new, or known) a further holder of readable blocks of `source_holder`."""
        self._live(source_holder)
        assert not self._is_released(target_holder), f"holder {target_holder} was released"
        assert source_holder != target_holder, f"holder {source_holder} shares with itself"
        blocks = self._current(handles)
        for block in blocks:
            holders = self._readable.get(block, frozenset())
            assert source_holder in holders, f"block {block} is not readable for holder {source_holder}"
            assert target_holder not in holders, f"block {block} is shared with holder {target_holder} already"
            self._readable[block] = holders | {target_holder}
        self._holdings.setdefault(target_holder, _Holding()).blocks.extend(blocks)

    def pin(self, holder: HolderId) -> None:
        """A local thread begins to work on the holder's blocks. Pins count."""
        self._live(holder).num_pins += 1

    def unpin(self, holder: HolderId) -> tuple[int, ...]:
        """A local thread has ended its work. Returns the blocks that this freed, if the holder was released before."""
        holding = self._known(holder)
        assert holding.num_pins > 0, f"holder {holder} is not pinned"
        holding.num_pins -= 1
        return self._drop(holder) if holding.is_released and not holding.num_pins else ()

    def release(self, holder: HolderId) -> tuple[int, ...]:
        """Free everything the holder has, at once, or at its last unpin. Returns the blocks that became free now.

        A reservation is free at once in both cases, since no thread works on a count. Raises `UnknownHolder`.
        """
        holding = self._known(holder)
        assert not holding.is_released, f"holder {holder} is released twice"
        self._num_reserved -= holding.num_reserved
        holding.num_reserved = 0
        holding.is_released = True
        return () if holding.num_pins else self._drop(holder)

    # -- questions

    def is_shared(self, handle: BlockHandle) -> bool:
        """Whether a block has several holders, and so must be copied before an append."""
        (block,) = self._current((handle,))
        return len(self._readable.get(block, ())) > 1

    def knows(self, holder: HolderId) -> bool:
        """Whether the holder has, or a pin keeps, anything."""
        return holder in self._holdings

    def num_reserved(self, holder: HolderId) -> int:
        """Blocks promised to the holder and not taken yet. Raises `UnknownHolder`."""
        return self._known(holder).num_reserved

    def handles(self, holder: HolderId) -> tuple[BlockHandle, ...]:
        """The holder's blocks, filling and readable, in the order it got them. Raises `UnknownHolder`."""
        return tuple(BlockHandle(block, self._generations[block]) for block in self._known(holder).blocks)

    def counts(self) -> PoolCounts:
        """Blocks by state."""
        return PoolCounts(
            free=len(self._free) - self._num_reserved,
            reserved=self._num_reserved,
            filling=len(self._filling),
            readable=len(self._readable),
            total=len(self._generations),
        )

    def check(self) -> None:
        """Assert that every block is in exactly one state, and that holders and blocks agree about each other."""
        counts = self.counts()
        assert counts.free + counts.reserved + counts.filling + counts.readable == counts.total, (
            f"blocks are lost: {counts}"
        )
        assert min(counts.free, counts.reserved) >= 0, f"more is promised than there is: {counts}"
        every = sorted([*self._free, *self._filling, *self._readable])
        assert every == list(range(counts.total)), "a block is in no state, or in two"
        assert self._free == sorted(self._free), "the free list is out of order"
        assert self._num_reserved == sum(h.num_reserved for h in self._holdings.values()), "reservations do not add up"
        held = {(block, holder) for holder, holding in self._holdings.items() for block in holding.blocks}
        known = {(block, holder) for block, holders in self._readable.items() for holder in holders}
        assert held == known | set(self._filling.items()), "holders and blocks disagree"
        assert len(held) == sum(len(h.blocks) for h in self._holdings.values()), "a holder has a block twice"
        assert all(h.num_pins and not h.num_reserved for h in self._holdings.values() if h.is_released), "a ghost stays"

    # -- a plain value

    def copy(self) -> BlockPool:
        """An equal pool that shares nothing with this one."""
        twin = object.__new__(BlockPool)
        twin._generations = self._generations.copy()
        twin._free = self._free.copy()
        twin._num_reserved = self._num_reserved
        twin._filling = self._filling.copy()
        twin._readable = self._readable.copy()
        twin._holdings = {holder: holding.copy() for holder, holding in self._holdings.items()}
        return twin

    def key(self) -> tuple[object, ...]:
        """A hashable snapshot; two pools are equal exactly if their keys are."""
        return (
            tuple(self._generations),
            frozenset(self._filling),
            tuple(sorted((holder, holding.key()) for holder, holding in self._holdings.items())),
        )

    def __eq__(self, other: object) -> bool:
        """Equal in every state, generation and holder."""
        return self.key() == other.key() if isinstance(other, BlockPool) else NotImplemented

    # -- inside

    def _known(self, holder: HolderId) -> _Holding:
        holding = self._holdings.get(holder)
        if holding is None:
            raise UnknownHolder(f"holder {holder} has nothing in this pool")
        return holding

    def _live(self, holder: HolderId) -> _Holding:
        holding = self._known(holder)
        assert not holding.is_released, f"holder {holder} was released"
        return holding

    def _is_released(self, holder: HolderId) -> bool:
        holding = self._holdings.get(holder)
        return holding is not None and holding.is_released

    def _current(self, handles: Iterable[BlockHandle]) -> list[int]:
        blocks = []
        for handle in handles:
            assert 0 <= handle.block < len(self._generations), f"no block {handle.block} in this pool"
            now = self._generations[handle.block]
            assert handle.generation == now, (
                f"stale handle: block {handle.block} is at generation {now}, not {handle.generation}"
            )
            blocks.append(handle.block)
        assert len(set(blocks)) == len(blocks), "a block is named twice"
        return blocks

    def _find_run(self, num_blocks: int) -> int:
        free, reach = self._free, num_blocks - 1
        for first in range(min(len(free) - reach, DEFAULT_LIMITS.run_search)):
            if free[first + reach] - free[first] == reach:
                return first
        return 0

    def _drop(self, holder: HolderId) -> tuple[int, ...]:
        freed = []
        for block in self._holdings.pop(holder).blocks:
            others = self._readable.get(block, frozenset()) - {holder}
            if others:
                self._readable[block] = others
                continue
            self._readable.pop(block, None)
            self._filling.pop(block, None)
            self._generations[block] += 1
            freed.append(block)
        self._free.extend(freed)
        self._free.sort()
        return tuple(freed)
