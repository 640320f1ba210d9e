"""Waiting for room in decode's private memory.

Never: gives a request less than all of its room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_server.room import RoomQueue
from kvlease.kvcache.memory import KVMemory, Room


class DecodeMemory:
    """The private memory, and those who wait for room in it."""

    def __init__(self, kv: KVMemory, max_bypass: int) -> None:
        """Nobody waits."""
        self.kv = kv
        kv.on_free = self._serve
        self._queue = RoomQueue(max_bypass)
        self._waiting: dict[int, tuple[int, Callable[[Room], None]]] = {}

    async def hold(self, num_blocks: int) -> Room:
        """Room for a new sequence, when it is this caller's turn. Cancelled: nothing is held."""
        future: asyncio.Future[Room] = asyncio.get_running_loop().create_future()
        number = self.ask(num_blocks, future.set_result)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.done():
                self.kv.free(future.result())
            self.withdraw(number)
            raise

    def ask(self, num_blocks: int, take: Callable[[Room], None]) -> int:
        """A ticket; `take` is called with the room when it is this one's turn, maybe before this returns."""
        number = self._queue.ask(num_blocks)
        self._waiting[number] = (num_blocks, take)
        self._serve()
        return number

    def withdraw(self, number: int) -> None:
        """The ticket's owner has gone. Harmless when it was served; who waited behind it may fit now."""
        self._queue.withdraw(number)
        self._waiting.pop(number, None)
        self._serve()

    def _serve(self) -> None:
        while (number := self._queue.serve(self.kv.counts().free)) is not None:
            num_blocks, take = self._waiting.pop(number)
            room = self.kv.hold(num_blocks)
            assert room is not None, "the queue serves only what fits"
            take(room)
