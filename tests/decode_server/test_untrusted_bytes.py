"""Whatever arrives in a landing ring: a block that was granted, or nothing; the others' leases, rooms and memory are as they were."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from decode_server.landing import Berth, Dock
from decode_server.memory import DecodeMemory
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.decode_attempt import BlockRefused, BlockVerified
from kvlease.handoff.lease_book import Lease
from kvlease.handoff.messages import Commit, Epoch, Grant, LeaseId, Nonce
from kvlease.kvcache.landing import Expectation
from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.memory import KVMemory
from kvlease.kvcache.pool import BlockPool
from kvlease.kvcache.storage import KVStorage
from tests.kvcache.border import LAYOUT, Source
from transport.contract import ChannelStatistics, Slot

BLOCK_SIZE = 4


@dataclass
class Ring:
    """A landing end that brings these frames, and knows what was given back."""

    frames: list[bytes]
    num_taken: int = 0
    released: list[int] = field(default_factory=list)
    is_empty: asyncio.Event = field(default_factory=asyncio.Event)

    offer = b""

    async def establish(self, answer: bytes) -> None:
        raise NotImplementedError

    async def receive(self) -> Slot:
        if self.num_taken == len(self.frames):
            self.is_empty.set()
            await asyncio.Event().wait()
        frame = self.frames[self.num_taken]
        self.num_taken += 1
        memory = bytearray(frame) + b"\xee" * 64  # what an earlier frame left behind this one
        return Slot(self.num_taken - 1, memoryview(memory), len(frame))

    def release(self, slot: Slot) -> None:
        self.released.append(slot.sequence_number)

    def statistics(self) -> ChannelStatistics:
        raise NotImplementedError

    async def close(self) -> None:
        raise NotImplementedError


@dataclass
class Inbox:
    """What an attempt heard."""

    heard: list[object] = field(default_factory=list)

    def post(self, happening: object) -> None:
        self.heard.append(happening)


class Harbour:
    """A dock with the lease of `source`, and another attempt's lease beside it."""

    def __init__(self, source: Source) -> None:
        self.kv = KVMemory(BlockPool(12), SlotLedger(12, BLOCK_SIZE), KVStorage(LAYOUT, 12, BLOCK_SIZE))
        self.counters: Counter[str] = Counter()
        self.thread = WorkThread("test")
        self.dock = Dock(DecodeMemory(self.kv, 1), self.thread, self.counters)
        self.mine, self.theirs = Inbox(), Inbox()
        self.leases = [self._open(source, b"l", self.mine), self._open(source, b"x", self.theirs)]

    def _open(self, source: Source, name: bytes, inbox: Inbox) -> Lease:
        room = self.kv.hold(source.num_blocks)
        assert room is not None
        lease_id = LeaseId(name * 16)
        expectation = expectation_of(source, lease_id)
        grant = Grant(lease_id, Nonce(b"n" * 16), Epoch(1))
        lease = Lease(grant, room.holder, source.num_tokens, source.num_blocks)
        self.dock.open(lease, Berth(room, expectation, inbox))
        return lease

    async def land(self, frames: list[bytes]) -> Ring:
        ring = Ring(frames)
        landing = asyncio.create_task(self.dock.land(ring))
        await asyncio.wait_for(ring.is_empty.wait(), 10)
        landing.cancel()
        await asyncio.wait([landing])
        return ring


def expectation_of(source: Source, lease_id: bytes) -> Expectation:
    lease = source.lease
    return Expectation(lease_id, b"n" * 16, lease.fingerprint, lease.chains, source.num_tokens, BLOCK_SIZE)


SOURCE = Source(block_size=BLOCK_SIZE)
GOOD = [bytes(SOURCE.sealed(position)) for position in range(SOURCE.num_blocks)]


def claiming(lease_id: bytes) -> bytes:
    """A block under a good tag of a lease that may not exist."""
    return bytes(SOURCE.resealed(0, lease_id=lease_id))


def damaged(position: int, place: int, noise: int) -> bytes:
    block = bytearray(GOOD[position])
    block[place % len(block)] ^= noise
    return bytes(block)


frames = st.one_of(
    st.sampled_from(GOOD),
    st.binary(min_size=1, max_size=300),
    st.binary(min_size=16, max_size=16).map(claiming),
    st.builds(damaged, st.integers(0, len(GOOD) - 1), st.integers(0, 2000), st.integers(1, 255)),
    st.sampled_from(GOOD).flatmap(lambda block: st.integers(1, len(block)).map(lambda end: block[:end])),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(frames, max_size=8))
def test_any_frames_verify_granted_blocks_once_and_touch_nothing_else(sent: list[bytes]) -> None:
    harbour = Harbour(SOURCE)
    before = harbour.kv.counts()
    try:
        ring = asyncio.run(harbour.land(sent))
    finally:
        harbour.thread.close()
    assert ring.released == list(range(len(sent))), "each slot goes back, in order"
    heard = harbour.mine.heard
    verified = [each.lease for each in heard if isinstance(each, BlockVerified)]
    assert len(verified) == len({block for block in sent if block in GOOD}), "a granted block is verified once"
    assert [lease.num_verified for lease in verified] == list(range(1, len(verified) + 1))
    assert all(isinstance(each, BlockVerified | BlockRefused) for each in heard)
    assert len(heard) == sum(
        block[:8] == b"KVLSEAL\0" and block[16:32] == b"l" * 16 for block in sent if len(block) >= 256
    )
    assert not harbour.theirs.heard, "nobody hears of another's blocks"
    assert harbour.kv.counts() == before
    assert sum(harbour.counters.values()) == len(sent), "each frame is counted"
    assert len(harbour.counters) <= 16, "by one of a few names, whatever was sent"


@given(st.integers(0, 2**32 - 1), st.integers(0, 2**32 - 1))
def test_a_manifest_agrees_only_with_the_lease_that_was_granted(num_blocks: int, num_tokens: int) -> None:
    lease = Lease(Grant(LeaseId(b"l" * 16), Nonce(b"n" * 16), Epoch(1)), 1, 10, 3)
    wrong = lease.disagreement(Commit(num_blocks, num_tokens, 1))
    assert (wrong is None) == ((num_blocks, num_tokens) == (3, 10))
