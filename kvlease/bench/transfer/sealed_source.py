"""The shipped sending path: a computed prompt's blocks, sealed by a departure line into the ring.

The pool holds random bytes. What makes a prompt "computed" is a pass of the shipped runner with a model that computes nothing, since
how fast a model is does not belong to this measurement.

Never: proves a slot itself.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from random import Random

from kvlease.bench.errors import BenchFailed
from kvlease.bench.idle_model import IdleModel, pass_over
from kvlease.bench.transfer.lease_papers import EPOCH, FINGERPRINT, VOCAB_SIZE, LeasePapers, layout_of, prompt_of
from kvlease.bench.transfer.plan import TOKENS_PER_BLOCK, BlockShape
from kvlease.engine.runner import ModelRunner
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.messages import (
    Admitted,
    Commit,
    Incarnation,
    Proposal,
    Receipt,
    RequestId,
    TenantId,
)
from kvlease.handoff.prefill_attempt import ChunkComputed, Judged, Started
from kvlease.kvcache.layout import Layout
from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.memory import KVMemory, Room
from kvlease.kvcache.pool import BlockPool
from kvlease.kvcache.storage import KVStorage
from kvlease.models.facts import ModelFacts
from kvlease.sampling.params import SamplingParams
from prefill_server.departure import DepartureLine
from prefill_server.prompts import Prompt
from transport.contract import Departure


class NoQueue:
    """The queue of a prompt that never waits."""

    def enter(self, prompt: Prompt) -> None:
        """It has begun already."""

    def leave(self, prompt: Prompt) -> None:
        """It was never here."""


class SealedSource:
    """Prompts of whole blocks, one at a time, through a `DepartureLine`."""

    def __init__(self, shape: BlockShape, num_blocks: int) -> None:
        """A pool of `num_blocks`, filled with noise. It takes a while, in which no channel may be open that must show life."""
        layout = layout_of(shape)
        storage = KVStorage(layout, num_blocks, TOKENS_PER_BLOCK)
        for index in range(len(layout.layers)):
            for name in ("k", "v"):
                storage.array(index, name).normal_()
        self._runner = _runner(storage, layout)
        self._kv = KVMemory(BlockPool(num_blocks), self._runner.ledger, storage)
        self._thread = WorkThread("departure")
        self._line = DepartureLine(self._kv, self._thread, Counter())
        self._sending: asyncio.Task[None] | None = None
        self._prompt: Prompt | None = None
        self._num_blocks = 0

    def start(self, departure: Departure) -> None:
        """Send into this channel from now on."""
        self._sending = asyncio.create_task(self._line.run(departure))

    async def prepare(self, num_blocks: int, order: str, seed: int) -> str:
        """Compute a prompt in a table of this order, and have its lease granted."""
        papers, tokens = LeasePapers.draw(), prompt_of(num_blocks)
        prompt = Prompt(_proposal(tokens), TOKENS_PER_BLOCK, self._kv, NoQueue(), self._line)
        prompt.happen(Judged(Admitted(0)))
        room = self._kv.hold(num_blocks)
        assert room is not None, "the pool has room for one prompt, and the last one was freed"
        prompt.room = shuffled(room, order, seed)
        prompt.happen(Started(in_one_chunk=False))
        # In a thread: it takes a while, and open channels must show that they live.
        await self._thread.run(pass_over, self._runner, room.holder, prompt.room.table, tokens)
        prompt.computed = self._kv.ledger.computed(room.holder, prompt.room.table, len(tokens))
        prompt.happen(papers.grant)
        self._prompt, self._num_blocks = prompt, 0
        return papers.text

    async def send(self, num_blocks: int) -> None:
        """Call the next blocks computed, and wait until they have left; behind the last one its manifest is taken."""
        prompt = self._prompt
        assert prompt is not None, "nothing is prepared"
        self._num_blocks += num_blocks
        num_tokens = self._num_blocks * TOKENS_PER_BLOCK
        is_all = num_tokens == prompt.attempt.num_tokens
        prompt.happen(ChunkComputed(num_tokens, 0 if is_all else None))
        if is_all:
            await self._manifest(prompt)
            prompt.happen(Receipt(self._num_blocks))

    async def close(self) -> None:
        """End the line and its thread."""
        if self._sending is not None:
            self._sending.cancel()
            await asyncio.wait([self._sending])
        self._thread.close()

    async def _manifest(self, prompt: Prompt) -> None:
        assert self._sending is not None, "it was started"
        reading = asyncio.create_task(self._read_manifest(prompt))
        await asyncio.wait((reading, self._sending), return_when=asyncio.FIRST_COMPLETED)
        if not reading.done():
            reading.cancel()
            self._sending.result()  # raises why it ended
            raise BenchFailed("the departure line ended by itself")
        reading.result()

    async def _read_manifest(self, prompt: Prompt) -> None:
        while not isinstance(message := await prompt.outbox.get(), Commit):
            if message is None:
                raise BenchFailed(f"the prompt ended as {prompt.attempt.state}")


def shuffled(room: Room, order: str, seed: int) -> Room:
    """The room with its blocks in this order."""
    handles = list(room.handles)
    if order == "random":
        Random(seed).shuffle(handles)  # noqa: S311  a seed that gives the same order again
    return Room(room.holder, tuple(handles))


def _runner(storage: KVStorage, layout: Layout) -> ModelRunner:
    width = layout.layers[0][0].shape[-1]
    facts = ModelFacts(
        "idle", "llama", VOCAB_SIZE, len(layout.layers), 1, width, 1 << 20, "float32", frozenset(), FINGERPRINT
    )
    return ModelRunner(IdleModel(VOCAB_SIZE), facts, storage, SlotLedger(storage.num_blocks, storage.block_size))


def _proposal(tokens: tuple[int, ...]) -> Proposal:
    return Proposal(
        RequestId("bench"),
        1,
        TenantId("bench"),
        tokens,
        2,  # one more than the token that prefill draws, or nothing would be transferred
        SamplingParams(),
        frozenset(),
        60.0,
        Incarnation(bytes(16)),
        EPOCH,
        FINGERPRINT,
    )
