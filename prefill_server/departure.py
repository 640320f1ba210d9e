"""Fills a pair's departure ring: seals computed blocks of granted prompts, in turn, and sends them.

Never: seals a block that `ComputedBlocks` does not prove, or sends one whose prompt has ended.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque

from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.messages import AbortReason
from kvlease.handoff.prefill_attempt import BlockSent, EndedHere
from kvlease.handoff.verdicts import aborted
from kvlease.kvcache.departure import DepartureLease, seal_block
from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.ledger import ComputedBlocks
from kvlease.kvcache.memory import KVMemory
from prefill_server.prompts import Prompt
from transport.contract import Departure, Slot


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
            if not self._prompts:
                departure.give_back(slot)
                continue
            prompt = self._prompts[0]
            self._prompts.rotate(-1)
            await self._send(prompt, departure, slot)

    async def _send(self, prompt: Prompt, departure: Departure, slot: Slot) -> None:
        room, computed, lease = prompt.room, prompt.computed, prompt.lease
        assert room is not None, "what may be sent has room"
        assert computed is not None, "what may be sent is computed"
        assert lease is not None, "what may be sent is granted"
        num_bytes = 0
        self._kv.pin((room,))
        try:
            num_bytes = await self._seal(computed, lease, prompt.attempt.num_sent, slot)
        except UnprovenSlot as error:
            # This prompt's blocks are not what they should be; the pair's other prompts go on.
            self._counters["seals_refused"] += 1
            prompt.happen(EndedHere(aborted(AbortReason.ENGINE_FAILED, str(error))))
        finally:
            self._kv.unpin((room,))
        if not prompt.attempt.may_send:
            departure.give_back(slot)
            return
        departure.send(slot, num_bytes)
        self._counters["blocks_sent"] += 1
        if not prompt.happen(BlockSent()).may_send:
            self.leave(prompt)

    async def _seal(self, computed: ComputedBlocks, lease: DepartureLease, position: int, slot: Slot) -> int:
        storage = self._kv.storage
        work = (storage, computed, lease, position, slot.memory)
        if storage.is_on_host:
            return await self._thread.run_copy(len(slot.memory), seal_block, *work)
        return await self._thread.run(seal_block, *work)
