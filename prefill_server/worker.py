"""The compute loop: one chunked forward pass after the other while any prompt can run.

Never: touches a prompt's blocks without a pin.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlease.engine.isolation import Failure, Result, Runner, run_isolated
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.messages import AbortReason
from kvlease.handoff.prefill_attempt import ChunkComputed, EndedHere
from kvlease.handoff.verdicts import aborted
from kvlease.kvcache.memory import KVMemory
from prefill_server.scheduler import Chunk, PromptQueue


@dataclass(slots=True)
class ComputeLoop:
    """`is_busy` while a pass runs: then the engine's pulse must grow."""

    queue: PromptQueue
    kv: KVMemory
    runner: Runner
    thread: WorkThread
    is_busy: bool = False

    async def run(self) -> None:
        """Until cancelled."""
        while True:
            chunks = self.begin()
            if not chunks:
                self.queue.changed.clear()
                await self.queue.changed.wait()
                continue
            results = await self._compute(chunks)
            self.publish(chunks, results)

    async def _compute(self, chunks: list[Chunk]) -> list[Result]:
        try:
            return await self.thread.run(self.compute, chunks)
        finally:
            self.unpin(chunks)

    def begin(self) -> list[Chunk]:
        """What the next pass computes, its rooms pinned; `unpin` must follow unless it is empty."""
        chunks = self.queue.next_chunks()
        if chunks:
            self.kv.pin([chunk.room for chunk in chunks])
            self.is_busy = True
        return chunks

    def unpin(self, chunks: list[Chunk]) -> None:
        """The engine's thread is done with the rooms."""
        self.is_busy = False
        self.kv.unpin([chunk.room for chunk in chunks])

    def publish(self, chunks: list[Chunk], results: list[Result]) -> None:
        """Tell each prompt what became of its chunk."""
        for chunk, result in zip(chunks, results, strict=True):
            self._publish(chunk, result)

    def compute(self, chunks: list[Chunk]) -> list[Result]:
        """The pass itself, on scrubbed memory. For the engine's thread."""
        for chunk in chunks:
            if chunk.is_new:
                self.kv.scrub(chunk.room)
        return run_isolated(self.runner, [chunk.step for chunk in chunks])

    def _publish(self, chunk: Chunk, result: Result) -> None:
        prompt = chunk.prompt
        if prompt.room is not chunk.room:
            return  # ended while the pass ran
        if isinstance(result, Failure):
            prompt.happen(EndedHere(aborted(AbortReason.ENGINE_FAILED, result.message)))
            return
        prompt.computed = self.kv.ledger.computed(chunk.room.holder, chunk.room.table, chunk.end)
        if result:
            first, *further = result  # of the prompt's last chunk, one for each choice
            prompt.happen(ChunkComputed(chunk.end, first.token_id, first.logprobs, tuple(further)))
        else:
            prompt.happen(ChunkComputed(chunk.end, None))
        self.queue.computed(prompt)
