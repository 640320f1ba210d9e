"""An engine that decodes beside a transfer, in the receiving process, as in a decode server: its own thread, its own pool.

Never: shares a pool with the transfer.
"""

from __future__ import annotations

import asyncio
import time

from kvlease.bench.errors import BenchFailed
from kvlease.bench.models import measured_model
from kvlease.engine.batch import Draw, SequenceStep
from kvlease.engine.runner import ModelRunner
from kvlease.engine.threads import set_threads
from kvlease.engine.work_thread import WorkThread
from kvlease.kvcache.sizing import blocks_for
from kvlease.sampling.params import SamplingParams

PROMPT_TOKENS = 128
MOST_TOKENS = 512  # then the streams begin again
BLOCK_SIZE = 16


class EngineLoad:
    """Decodes without a pause from `start` to `stop`."""

    def __init__(self, runner: ModelRunner, num_streams: int) -> None:
        """The streams' prompts are not computed yet."""
        self._runner, self._thread = runner, WorkThread("engine")
        blocks = blocks_for(MOST_TOKENS, BLOCK_SIZE)
        self._tables = [tuple(range(blocks * index, blocks * (index + 1))) for index in range(num_streams)]
        self._next_id = 1
        self._steps_s: list[float] = []
        self._task: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, model: str, num_streams: int) -> EngineLoad:
        """Load the model of a folder, or a tiny one, and begin."""
        load = cls(await asyncio.to_thread(_load, model, num_streams), num_streams)
        load._task = asyncio.create_task(load._decode())
        return load

    async def stop(self) -> list[float]:
        """End; the time of each decode step (s)."""
        assert self._task is not None, "it was started"
        if self._task.done():
            raise BenchFailed(f"the engine ended by itself: {self._task.exception()}")
        self._task.cancel()
        await asyncio.wait([self._task])
        self._thread.close()
        return self._steps_s

    async def _decode(self) -> None:
        while True:
            ids = list(range(self._next_id, self._next_id + len(self._tables)))
            self._next_id += len(ids)
            for sequence_id, table in zip(ids, self._tables, strict=True):
                self._runner.ledger.clear(table)
                await self._thread.run(self._step, [sequence_id], [table], 0, tuple(range(10, 10 + PROMPT_TOKENS)))
            for length in range(PROMPT_TOKENS, MOST_TOKENS):
                started = time.monotonic()
                await self._thread.run(self._step, ids, self._tables, length, (10,))
                self._steps_s.append(time.monotonic() - started)

    def _step(self, ids: list[int], tables: list[tuple[int, ...]], length: int, tokens: tuple[int, ...]) -> None:
        readable = self._runner.ledger.readable
        steps = [
            SequenceStep(readable(sequence_id, table, length), tokens, (Draw(SamplingParams()),))
            for sequence_id, table in zip(ids, tables, strict=True)
        ]
        self._runner.run(steps)


def _load(model: str, num_streams: int) -> ModelRunner:
    set_threads(1)
    num_blocks = num_streams * blocks_for(MOST_TOKENS, BLOCK_SIZE)
    with measured_model(model) as folder:
        return ModelRunner.load(folder, dtype="float32", device="cpu", num_blocks=num_blocks, block_size=BLOCK_SIZE)
