"""Waiting for room in decode's private memory.

Never: gives a request less than all of its room.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from decode_server.room import RoomQueue
from kvlease.kvcache.memory import KVMemory, Room

Rooms = tuple[Room, ...]  # of one request, one for each choice; the first holds the prompt


class DecodeMemory:
    """The private memory, and those who wait for room in it."""

    def __init__(self, kv: KVMemory, max_bypass: int) -> None:
        """Nobody waits."""
        self.kv = kv
        kv.on_free = self._serve
        self._queue = RoomQueue(max_bypass)
        self._waiting: dict[int, tuple[tuple[int, ...], Callable[[Rooms], None]]] = {}

    async def hold(self, sizes: tuple[int, ...]) -> Rooms:
        """Room of each size (blocks) for a new request, all at once, when it is this caller's turn. Cancelled: nothing is held."""
        future: asyncio.Future[Rooms] = asyncio.get_running_loop().create_future()
        number = self.ask(sizes, future.set_result)
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            if future.done():
                for room in future.result():
                    self.kv.free(room)
            self.withdraw(number)
            raise

    def ask(self, sizes: tuple[int, ...], take: Callable[[Rooms], None]) -> int:
        """A ticket; `take` is called with the rooms when it is this one's turn, maybe before this returns."""
        number = self._queue.ask(sum(sizes))
        self._waiting[number] = (sizes, take)
        self._serve()
        return number

    def withdraw(self, number: int) -> None:
        """The ticket's owner has gone. Harmless when it was served; who waited behind it may fit now."""
        self._queue.withdraw(number)
        self._waiting.pop(number, None)
        self._serve()

    def _serve(self) -> None:
        while (number := self._queue.serve(self.kv.counts().free)) is not None:
            sizes, take = self._waiting.pop(number)
            rooms = tuple(room for room in map(self.kv.hold, sizes) if room is not None)
            assert len(rooms) == len(sizes), "the queue serves only what fits"
            take(rooms)
