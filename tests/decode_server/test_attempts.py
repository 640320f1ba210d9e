"""What becomes of an attempt whose stream ends while decode writes: its reader says so, not the write that failed."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

from decode_server.attempts import AttemptEnd, AttemptRun
from decode_server.landing import Dock
from decode_server.memory import DecodeMemory
from decode_server.peers import Peer
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Admitted,
    AttemptDown,
    AttemptUp,
    Complete,
    FinishReason,
    Grant,
    Ready,
)
from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.memory import KVMemory
from kvlease.kvcache.pool import BlockPool
from kvlease.kvcache.storage import KVStorage
from kvlease.peering.errors import PairLost
from tests.handoff.joined import proposal

COMPLETE = Complete(2, FinishReason.STOP)


class EndingStream:
    """Prefill has said `last` and ended the stream just before decode's grant: the write fails before `last` is read."""

    def __init__(self, last: AttemptDown | PairLost) -> None:
        self._last, self._refused = last, asyncio.Event()

    async def send(self, message: AttemptUp) -> None:
        if isinstance(message, Grant):
            self._refused.set()
            raise PairLost("the stream has ended: a late write")

    async def messages(self) -> AsyncIterator[AttemptDown]:
        yield Admitted(0)
        yield Ready()
        await self._refused.wait()
        await asyncio.sleep(0)  # the write's failure is known first
        if isinstance(self._last, PairLost):
            raise self._last
        yield self._last

    def cancel(self) -> None: ...


def run_attempt(last: AttemptDown | PairLost) -> tuple[AttemptEnd, KVMemory]:
    async def run() -> tuple[AttemptEnd, KVMemory]:
        stream, thread = EndingStream(last), WorkThread("landing")
        kv = KVMemory(BlockPool(8), SlotLedger(8, 4), KVStorage(attention_layout(1, 1, 1, "float32"), 8, 4))
        memory = DecodeMemory(kv, 8)
        pair: Any = SimpleNamespace(open_attempt=lambda: stream, standing=set(), progress=0)
        peer = Peer(pair, Dock(memory, thread, Counter()))
        try:
            end = await AttemptRun(proposal(), peer, memory, thread, vocab_size=1000).run()
        finally:
            thread.close()
        return end, kv

    return asyncio.run(run())


def test_what_prefill_said_before_the_end_outlives_a_grant_that_came_too_late() -> None:
    end, kv = run_attempt(COMPLETE)
    assert end == COMPLETE
    assert kv.counts().free == kv.counts().total


def test_a_stream_that_broke_is_told_by_its_reader() -> None:
    end, kv = run_attempt(PairLost("UNAVAILABLE: Socket closed"))
    assert cast("Aborted", end).reason is AbortReason.PEER_LOST
    assert cast("Aborted", end).message == "UNAVAILABLE: Socket closed"
    assert kv.counts().free == kv.counts().total
