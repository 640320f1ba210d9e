"""What leaves prefill, and what a slot that is not proven costs: its own prompt, and nobody else."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import pytest

from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Admitted,
    Commit,
    Epoch,
    Grant,
    Incarnation,
    LeaseId,
    Nonce,
    Proposal,
    RequestId,
    TenantId,
)
from kvlease.handoff.prefill_attempt import ChunkComputed, Judged
from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.memory import KVMemory
from kvlease.kvcache.pool import BlockPool
from kvlease.kvcache.seal import sealed_block_bytes
from kvlease.kvcache.storage import KVStorage
from kvlease.sampling.params import SamplingParams
from prefill_server.departure import DepartureLine
from prefill_server.prompts import Prompt
from prefill_server.scheduler import PromptQueue
from tests.waiting import until
from transport.contract import ChannelStatistics, Slot

BLOCK_SIZE, NUM_TOKENS = 4, 8
LAYOUT = attention_layout(1, 1, 16, "float32")


@dataclass
class Pier:
    """A departure end that keeps what is sent; it has all the credit there is."""

    sent: list[bytes] = field(default_factory=list)
    num_given_back: int = 0

    async def ready(self) -> None:
        return None

    async def reserve(self) -> Slot:
        await asyncio.sleep(0)
        return Slot(0, memoryview(bytearray(sealed_block_bytes(LAYOUT, BLOCK_SIZE))), 0)

    def send(self, slot: Slot, num_bytes: int) -> None:
        self.sent.append(bytes(slot.memory[:num_bytes]))

    def give_back(self, slot: Slot) -> None:
        self.num_given_back += 1

    def statistics(self) -> ChannelStatistics:
        return ChannelStatistics(len(self.sent), 0, 0)

    async def close(self) -> None:
        return None


@pytest.fixture
def thread() -> Iterator[WorkThread]:
    thread = WorkThread("departure")
    yield thread
    thread.close()


def memory() -> KVMemory:
    return KVMemory(BlockPool(4), SlotLedger(4, BLOCK_SIZE), KVStorage(LAYOUT, 4, BLOCK_SIZE))


def granted(kv: KVMemory, queue: PromptQueue, line: DepartureLine, identity: bytes) -> Prompt:
    """A prompt that is computed and may be sent."""
    tokens, ends = tuple(range(NUM_TOKENS)), frozenset[int]()
    incarnation = Incarnation(b"i" * 16)
    proposal = Proposal(
        RequestId("r"), 1, TenantId("t"), tokens, 5, SamplingParams(), ends, 9.0, incarnation, Epoch(7), b"f" * 16
    )
    prompt = Prompt(proposal, BLOCK_SIZE, kv, queue, line)
    prompt.happen(Judged(Admitted(0)))
    (chunk,) = queue.next_chunks()
    blocks, slots = kv.ledger.locate(chunk.room.table, 0, NUM_TOKENS)
    kv.ledger.begin_write(blocks, slots)
    kv.ledger.record_computed(chunk.room.holder, blocks, slots, np.arange(NUM_TOKENS))
    prompt.computed = kv.ledger.computed(chunk.room.holder, chunk.room.table, NUM_TOKENS)
    prompt.happen(ChunkComputed(NUM_TOKENS, 42))
    queue.computed(prompt)
    prompt.happen(Grant(LeaseId(identity * 16), Nonce(b"n" * 16), Epoch(7)))
    return prompt


def said(prompt: Prompt) -> list[object]:
    return [prompt.outbox.get_nowait() for _ in range(prompt.outbox.qsize())]


def test_a_slot_that_is_not_proven_ends_its_prompt_alone(thread: WorkThread) -> None:
    async def test() -> None:
        kv, counters, pier = memory(), Counter[str](), Pier()
        queue = PromptQueue(kv, 512)
        line = DepartureLine(kv, thread, counters)
        broken, good = granted(kv, queue, line, b"a"), granted(kv, queue, line, b"b")
        assert broken.room is not None
        kv.ledger.clear(broken.room.table)  # as if the block table had led to somebody else's blocks
        running = asyncio.create_task(line.run(pier))
        await until(lambda: good.attempt.num_sent == 2, what="the other prompt is sent")
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()
        end = said(broken)[-2]
        assert isinstance(end, Aborted)
        assert end.reason is AbortReason.ENGINE_FAILED
        assert Commit(2, NUM_TOKENS, 42) in said(good)
        assert len(pier.sent) == 2
        assert counters["seals_refused"] == 1
        assert kv.counts().free == kv.counts().total

    asyncio.run(test())


def test_room_that_a_thread_kept_wakes_who_waits_for_it() -> None:
    async def test() -> None:
        kv = memory()
        queue = PromptQueue(kv, 512)
        room = kv.hold(4)
        assert room is not None
        kv.pin((room,))
        kv.free(room)
        queue.changed.clear()
        assert kv.hold(1) is None
        kv.unpin((room,))
        assert queue.changed.is_set()
        assert kv.hold(4) is not None

    asyncio.run(test())
