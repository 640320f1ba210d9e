"""The shipped receiving path: a dock that copies each block into private memory and verifies the copy.

Never: reads a block before it is verified, or counts one that was refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter

from decode_server.landing import Berth, Dock
from decode_server.memory import DecodeMemory
from kvlease.bench.errors import BenchFailed
from kvlease.bench.transfer.lease_papers import FINGERPRINT, LeasePapers, layout_of, prompt_of
from kvlease.bench.transfer.plan import TOKENS_PER_BLOCK, BlockShape
from kvlease.bench.transfer.sealed_source import shuffled
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.decode_attempt import BlockRefused, BlockVerified, Ended
from kvlease.handoff.lease_book import Lease
from kvlease.handoff.limits import Limits
from kvlease.handoff.messages import AttemptDown
from kvlease.kvcache.landing import Expectation
from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.memory import KVMemory, Room
from kvlease.kvcache.pool import BlockPool
from kvlease.kvcache.seal import chain_hashes
from kvlease.kvcache.storage import KVStorage
from transport.contract import Landing


class ArrivalBook:
    """Notes when each block of one lease was verified."""

    def __init__(self) -> None:
        """Nothing has landed."""
        self.arrivals: list[float] = []
        self.refusal = ""
        self.is_over = asyncio.Event()

    def post(self, happening: BlockVerified | BlockRefused | Ended | AttemptDown) -> None:
        """One block was judged."""
        if isinstance(happening, BlockVerified):
            self.arrivals.append(time.monotonic())
            if happening.lease.is_whole:
                self.is_over.set()
        else:
            self.refusal = str(happening)
            self.is_over.set()


class VerifyingTarget:
    """One lease at a time in a pool of `num_blocks`."""

    def __init__(self, shape: BlockShape, num_blocks: int) -> None:
        """An empty pool."""
        storage = KVStorage(layout_of(shape), num_blocks, TOKENS_PER_BLOCK)
        kv = KVMemory(BlockPool(num_blocks), SlotLedger(num_blocks, TOKENS_PER_BLOCK), storage)
        storage.scrub(range(num_blocks))  # touched, so that no transfer pays for the pages of a new process
        self._memory = DecodeMemory(kv, Limits().max_bypass)
        self._thread = WorkThread("landing")
        self._dock = Dock(self._memory, self._thread, Counter())
        self._landing: asyncio.Task[None] | None = None
        self._book = ArrivalBook()
        self._lease: Lease | None = None
        self._room: Room | None = None

    async def expect(self, num_blocks: int, order: str, seed: int, lease: str) -> None:
        """Room for them, and a berth under the lease."""
        self._end_lease()
        papers, tokens = LeasePapers.read(lease), prompt_of(num_blocks)
        self._book = ArrivalBook()
        (whole,) = await self._memory.hold((num_blocks,))
        self._room = room = shuffled(whole, order, seed)
        self._lease = Lease(papers.grant, room.holder, len(tokens), num_blocks)
        chains = chain_hashes(tokens, TOKENS_PER_BLOCK)
        expectation = Expectation(papers.lease_id, papers.nonce, FINGERPRINT, chains, len(tokens), TOKENS_PER_BLOCK)
        self._dock.open(self._lease, Berth(room, expectation, self._book))

    async def take(self, landing: Landing) -> list[float]:
        """Until every block of the lease is verified. Raises `BenchFailed` for one that was refused."""
        if self._landing is None:
            self._landing = asyncio.create_task(self._dock.land(landing))
        over = asyncio.create_task(self._book.is_over.wait())
        try:
            await asyncio.wait((over, self._landing), return_when=asyncio.FIRST_COMPLETED)
        finally:
            over.cancel()
        if self._book.refusal:
            raise BenchFailed(f"a block was refused: {self._book.refusal}")
        if not self._book.is_over.is_set():
            self._landing.result()  # raises why it ended
        return self._book.arrivals

    def close(self) -> None:
        """End the dock and its thread."""
        if self._landing is not None:
            self._landing.cancel()
        self._end_lease()
        self._thread.close()

    def _end_lease(self) -> None:
        if self._lease is not None and self._room is not None:
            self._dock.end(self._lease.grant.lease_id)
            self._memory.kv.free(self._room)
        self._lease = self._room = None
