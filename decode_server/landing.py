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


@dataclass(frozen=True, slots=True)
class Docking:
    """One block on its way in: the lease it claims, and that lease's berth when the block arrived."""

    lease_id: LeaseId
    berth: Berth


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
        docking = self.begin(content)
        if docking is None:
            return
        found = None
        try:
            found = await self._judged(docking, content)
        finally:
            self.finish(docking, found)

    def begin(self, content: memoryview) -> Docking | None:
        """Find the berth of an arrived block and pin its room, for `judge`; `finish` must follow. None: a stranger, counted."""
        lease_id = LeaseId(peek_lease(content) or b"")
        berth = self._berths.get(lease_id)
        if berth is None:
            self._counters["blocks_without_lease"] += 1
            return None
        self._memory.kv.pin((berth.room,))
        return Docking(lease_id, berth)

    def judge(self, docking: Docking, content: memoryview) -> Landed | Refused:
        """Copy the block in and verify the copy. For the landing thread, or the loop where that is cheaper."""
        kv, berth = self._memory.kv, docking.berth
        return land_block(kv.storage, kv.ledger, berth.room.holder, berth.room.table, berth.expectation, content)

    def finish(self, docking: Docking, found: Landed | Refused | None) -> None:
        """The thread is done with the room; tell the attempt what was found. None: nothing was, the landing is being ended."""
        self._memory.kv.unpin((docking.berth.room,))
        if found is not None:
            self._tell(docking.lease_id, docking.berth, found)

    async def _judged(self, docking: Docking, content: memoryview) -> Landed | Refused:
        if self._memory.kv.storage.is_on_host:
            return await self._thread.run_copy(len(content), self.judge, docking, content)
        return await self._thread.run(self.judge, docking, content)

    def _tell(self, lease_id: LeaseId, berth: Berth, found: Landed | Refused) -> None:
        if isinstance(found, Refused):
            self._counters[f"blocks_refused_{found.check}"] += 1
            berth.inbox.post(BlockRefused(found.check, found.message))
        elif self._book.find(lease_id) is None:
            self._counters["blocks_after_the_end"] += 1
        else:
            self._counters["blocks_verified"] += 1
            berth.inbox.post(BlockVerified(self._book.verify(lease_id, found.position)))
