"""Fills a pair's departure ring: seals computed blocks of granted prompts, in turn, and sends them.

Never: seals a block that `ComputedBlocks` does not prove, or sends one whose prompt has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from dataclasses import dataclass

from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.messages import AbortReason
from kvlease.handoff.prefill_attempt import BlockSent, EndedHere
from kvlease.handoff.verdicts import aborted
from kvlease.kvcache.departure import DepartureLease, seal_block
from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.ledger import ComputedBlocks
from kvlease.kvcache.memory import KVMemory, Room
from prefill_server.prompts import Prompt
from transport.contract import Departure, Slot


@dataclass(frozen=True, slots=True)
class Sealing:
    """One block on its way out, and all that its seal is made from, as it was when its turn came."""

    prompt: Prompt
    room: Room
    computed: ComputedBlocks
    lease: DepartureLease
    position: int


class DepartureLine:
    """The prompts of one pair that have blocks to send; each sends one block, then it is the next one's turn."""

    def __init__(self, kv: KVMemory, thread: WorkThread, counters: Counter[str]) -> None:
        """Nobody sends."""
        self._kv, self._thread, self._counters = kv, thread, counters
        self._prompts: deque[Prompt] = deque()
        self._has_work = asyncio.Event()

    def enter(self, prompt: Prompt) -> None:
        """The prompt has blocks to send. Harmless when it is in line."""
        if prompt not in self._prompts:
            self._prompts.append(prompt)
            self._has_work.set()

    def leave(self, prompt: Prompt) -> None:
        """It has ended, or sent everything that is computed."""
        if prompt in self._prompts:
            self._prompts.remove(prompt)

    async def run(self, departure: Departure) -> None:
        """Until cancelled or broken."""
        while True:
            while not self._prompts:
                self._has_work.clear()
                await self._has_work.wait()
            slot = await departure.reserve()
            sealing = self.begin()
            if sealing is None:
                departure.give_back(slot)
                continue
            await self._send(sealing, departure, slot)

    async def _send(self, sealing: Sealing, departure: Departure, slot: Slot) -> None:
        num_bytes = 0
        try:
            num_bytes = await self._seal(sealing, slot)
        except UnprovenSlot as error:
            # This prompt's blocks are not what they should be; the pair's other prompts go on.
            self._counters["seals_refused"] += 1
            sealing.prompt.happen(EndedHere(aborted(AbortReason.ENGINE_FAILED, str(error))))
        finally:
            self.sealed(sealing)
        if not self.may_leave(sealing):
            departure.give_back(slot)
            return
        departure.send(slot, num_bytes)
        self._counters["blocks_sent"] += 1
        self.left(sealing)

    async def _seal(self, sealing: Sealing, slot: Slot) -> int:
        if self._kv.storage.is_on_host:
            return await self._thread.run_copy(len(slot.memory), self.seal, sealing, slot.memory)
        return await self._thread.run(self.seal, sealing, slot.memory)

    def begin(self) -> Sealing | None:
        """The next block in turn, its room pinned; `sealed` must follow. None: nobody has anything to send any more."""
        if not self._prompts:
            return None
        prompt = self._prompts[0]
        self._prompts.rotate(-1)
        room, computed, lease = prompt.room, prompt.computed, prompt.lease
        assert room is not None, "what may be sent has room"
        assert computed is not None, "what may be sent is computed"
        assert lease is not None, "what may be sent is granted"
        self._kv.pin((room,))
        return Sealing(prompt, room, computed, lease, prompt.attempt.num_sent)

    def seal(self, sealing: Sealing, target: memoryview) -> int:
        """Copy the block out behind its seal; returns its bytes. For the sealing thread, or the loop where that is cheaper; raises `UnprovenSlot`."""
        return seal_block(self._kv.storage, sealing.computed, sealing.lease, sealing.position, target)

    def sealed(self, sealing: Sealing) -> None:
        """The thread is done with the room."""
        self._kv.unpin((sealing.room,))

    def may_leave(self, sealing: Sealing) -> bool:
        """Whether the sealed block may be sent: its prompt may have ended while it was sealed."""
        return sealing.prompt.attempt.may_send

    def left(self, sealing: Sealing) -> None:
        """The block is in the transport's hands."""
        if not sealing.prompt.happen(BlockSent()).may_send:
            self.leave(sealing.prompt)
