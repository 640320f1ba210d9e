"""Empties one pair's landing ring: finds the lease of each block, has it copied and verified, and tells its attempt.

Never: makes a block readable itself; only `land_block` does, and only from a verified copy.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Protocol

from decode_server.memory import DecodeMemory
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.decode_attempt import BlockRefused, BlockVerified, Ended
from kvlease.handoff.lease_book import Lease, LeaseBook
from kvlease.handoff.messages import AttemptDown, LeaseId
from kvlease.kvcache.landing import Expectation, Landed, Refused, land_block, peek_lease
from kvlease.kvcache.memory import Room
from transport.contract import Landing, Slot


class Inbox(Protocol):
    """Where an attempt hears what happened."""

    def post(self, happening: BlockVerified | BlockRefused | Ended | AttemptDown) -> None:
        """Take the news; does not wait."""


@dataclass(frozen=True, slots=True)
class Berth:
    """Where a lease's blocks go, what they must be, and who wants to hear of them."""

    room: Room
    expectation: Expectation
    inbox: Inbox


class Dock:
    """The leases of one pair and their berths. A block that names no lease of it is dropped and counted."""

    def __init__(self, memory: DecodeMemory, thread: WorkThread, counters: Counter[str]) -> None:
        """No lease yet."""
        self._memory, self._thread, self._counters = memory, thread, counters
        self._book = LeaseBook()
        self._berths: dict[LeaseId, Berth] = {}

    def open(self, lease: Lease, berth: Berth) -> None:
        """From now on blocks may land under the lease."""
        self._book.open(lease)
        self._berths[lease.grant.lease_id] = berth

    def end(self, lease_id: LeaseId) -> None:
        """From now on the lease's blocks are strangers."""
        self._book.end(lease_id)
        del self._berths[lease_id]

    async def land(self, landing: Landing) -> None:
        """Empty the ring until cancelled or broken."""
        while True:
            slot = await landing.receive()
            try:
                await self._take(slot)
            finally:
                landing.release(slot)

    async def _take(self, slot: Slot) -> None:
        content = slot.memory[: slot.num_bytes]
        lease_id = LeaseId(peek_lease(content) or b"")
        berth = self._berths.get(lease_id)
        if berth is None:
            self._counters["blocks_without_lease"] += 1
            return
        kv = self._memory.kv
        kv.pin((berth.room,))
        try:
            found = await self._land(berth, content)
        finally:
            kv.unpin((berth.room,))
        self._tell(lease_id, berth, found)

    async def _land(self, berth: Berth, content: memoryview) -> Landed | Refused:
        kv = self._memory.kv
        work = (kv.storage, kv.ledger, berth.room.holder, berth.room.table, berth.expectation, content)
        if kv.storage.is_on_host:
            return await self._thread.run_copy(len(content), land_block, *work)
        return await self._thread.run(land_block, *work)

    def _tell(self, lease_id: LeaseId, berth: Berth, found: Landed | Refused) -> None:
        if isinstance(found, Refused):
            self._counters[f"blocks_refused_{found.check}"] += 1
            berth.inbox.post(BlockRefused(found.check, found.message))
        elif self._book.find(lease_id) is None:
            self._counters["blocks_after_the_end"] += 1
        else:
            self._counters["blocks_verified"] += 1
            berth.inbox.post(BlockVerified(self._book.verify(lease_id, found.position)))
