"""Waiting for room in decode's private memory.

Never: gives a request less than all of its room.
"""

from __future__ import annotations

import asyncio

from decode_server.room import RoomQueue
from kvlease.kvcache.memory import KVMemory, Room


class DecodeMemory:
    """The private memory, and those who wait for room in it."""

    def __init__(self, kv: KVMemory, max_bypass: int) -> None:
        """Nobody waits."""
        self.kv = kv
        kv.on_free = self._serve
        self._queue = RoomQueue(max_bypass)
        self._waiting: dict[int, tuple[int, asyncio.Future[Room]]] = {}

    async def hold(self, num_blocks: int) -> Room:
        """Room for a new sequence, when it is this caller's turn. Cancelled: nothing is held."""
        future: asyncio.Future[Room] = asyncio.get_running_loop().create_future()
        number = self._queue.ask(num_blocks)
        self._waiting[number] = (num_blocks, future)
        self._serve()
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            self._queue.withdraw(number)
            self._waiting.pop(number, None)
            if future.done():
                self.kv.free(future.result())
            self._serve()  # who waited behind this one may fit
            raise

    def _serve(self) -> None:
        while (number := self._queue.serve(self.kv.counts().free)) is not None:
            num_blocks, future = self._waiting.pop(number)
            room = self.kv.hold(num_blocks)
            assert room is not None, "the queue serves only what fits"
            future.set_result(room)
