"""The sending side: where blocks come from, and how they get into the departure ring.

Never: loads torch; `sealed_source` does.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Protocol

from kvlease.bench.transfer.plan import BlockShape, order_of
from transport.contract import Departure


class Source(Protocol):
    """Blocks for one channel."""

    def start(self, departure: Departure) -> None:
        """Send into this one. Once, before anything else."""

    async def prepare(self, num_blocks: int, order: str, seed: int) -> str:
        """Get so many ready, from places in this order; returns the identities of their lease, in hex."""

    async def send(self, num_blocks: int) -> None:
        """Send the next `num_blocks` of those that are ready, until they are in the transport's hands."""

    async def close(self) -> None:
        """Nothing is sent any more."""


#: For blocks of a shape, and so many of them at most.
SourceMaker = Callable[[BlockShape, int], Source]


class PlainSource:
    """Copies blocks out of a pool, and neither seals nor looks at them."""

    def __init__(self, shape: BlockShape, pool: memoryview) -> None:
        """`pool`: whole blocks."""
        self._num_bytes, self._pool = shape.num_bytes, pool
        self._departure: Departure | None = None
        self._order: list[int] = []

    def start(self, departure: Departure) -> None:
        """Send into this channel."""
        self._departure = departure

    async def prepare(self, num_blocks: int, order: str, seed: int) -> str:
        """Only the order matters."""
        self._order = order_of(num_blocks, order, seed)
        self._order.reverse()
        return ""

    async def send(self, num_blocks: int) -> None:
        """Reserve, copy, send."""
        departure, num_bytes = self._departure, self._num_bytes
        assert departure is not None, "it was started"
        for _ in range(num_blocks):
            slot = await departure.reserve()
            start = self._order.pop() * num_bytes
            slot.memory[:num_bytes] = self._pool[start : start + num_bytes]
            departure.send(slot, num_bytes)

    async def close(self) -> None:
        """Nothing to end."""


def random_pool(num_bytes: int) -> memoryview:
    """Memory that a kernel cannot make smaller or share: random bytes, a mebibyte of them again and again, shifted each time."""
    pattern = os.urandom(1 << 20)
    pool = bytearray(num_bytes)
    for number, start in enumerate(range(0, num_bytes, len(pattern))):
        shifted = pattern[number * 4096 % len(pattern) :] + pattern[: number * 4096 % len(pattern)]
        pool[start : start + len(pattern)] = shifted[: num_bytes - start]
    return memoryview(pool)
