"""The pool: a model says what must be true, and random histories are compared with it."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from kvlease.kvcache.errors import UnknownHolder
from kvlease.kvcache.pool import BlockHandle, BlockPool, HolderId, PoolCounts

A, B, C = HolderId(1), HolderId(2), HolderId(3)
holders = st.integers(1, 4).map(HolderId)
NUM_BLOCKS = 12


def filled(num_blocks: int, holder: HolderId = A) -> tuple[BlockPool, tuple[BlockHandle, ...]]:
    pool = BlockPool(NUM_BLOCKS)
    assert pool.reserve(holder, num_blocks)
    return pool, pool.take(holder, num_blocks)


class PoolMachine(RuleBasedStateMachine):
    """The model: each holder's reservation, pins and blocks by state; a block is free when nobody has it."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.reserved: dict[HolderId, int] = {}
        self.pins: dict[HolderId, int] = {}
        self.ghosts: set[HolderId] = set()
        self.filling: dict[HolderId, set[BlockHandle]] = {}
        self.readable: dict[HolderId, set[BlockHandle]] = {}
        self.stale: list[BlockHandle] = []

    def known(self) -> list[HolderId]:
        return sorted(self.reserved)

    def live(self) -> list[HolderId]:
        return [holder for holder in self.known() if holder not in self.ghosts]

    def used(self) -> set[BlockHandle]:
        return set().union(*self.filling.values(), *self.readable.values())

    def admit(self, holder: HolderId) -> None:
        self.reserved.setdefault(holder, 0)
        self.pins.setdefault(holder, 0)
        self.filling.setdefault(holder, set())
        self.readable.setdefault(holder, set())

    def forget(self, holder: HolderId, freed: tuple[int, ...]) -> None:
        mine = self.filling.pop(holder) | self.readable.pop(holder)
        gone = mine - self.used()
        assert sorted(freed) == sorted(handle.block for handle in gone)
        self.stale.extend(gone)
        for table in (self.reserved, self.pins):
            del table[holder]
        self.ghosts.discard(holder)

    @rule(holder=holders, num_blocks=st.integers(0, NUM_BLOCKS + 1))
    def reserve(self, holder: HolderId, num_blocks: int) -> None:
        if holder in self.ghosts:
            return
        room = NUM_BLOCKS - len(self.used()) - sum(self.reserved.values())
        before = self.pool.key()
        assert self.pool.reserve(holder, num_blocks) == (num_blocks <= room)
        if num_blocks <= room:
            self.admit(holder)
            self.reserved[holder] += num_blocks
        else:
            assert self.pool.key() == before

    @precondition(lambda self: any(self.reserved[h] for h in self.live()))
    @rule(data=st.data())
    def take(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([h for h in self.live() if self.reserved[h]]))
        num_blocks = data.draw(st.integers(1, self.reserved[holder]))
        free = [block for block in range(NUM_BLOCKS) if block not in {handle.block for handle in self.used()}]
        handles = self.pool.take(holder, num_blocks)
        blocks = [handle.block for handle in handles]
        runs = [free[i : i + num_blocks] for i in range(len(free) - num_blocks + 1)]
        consecutive = [run for run in runs if run[-1] - run[0] == num_blocks - 1]
        assert blocks == (consecutive[0] if consecutive else free[:num_blocks])
        assert not set(handles) & set(self.stale)
        self.reserved[holder] -= num_blocks
        self.filling[holder] |= set(handles)

    @precondition(lambda self: any(self.filling[h] for h in self.live()))
    @rule(data=st.data())
    def publish(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([h for h in self.live() if self.filling[h]]))
        handles = data.draw(st.sets(st.sampled_from(sorted(self.filling[holder], key=lambda h: h.block)), min_size=1))
        self.pool.publish(holder, sorted(handles, key=lambda h: h.block))
        self.filling[holder] -= handles
        self.readable[holder] |= handles

    @precondition(lambda self: any(self.readable[h] for h in self.live()))
    @rule(data=st.data(), recipient=holders)
    def share(self, data: st.DataObject, recipient: HolderId) -> None:
        source = data.draw(st.sampled_from([h for h in self.live() if self.readable[h]]))
        ours = self.readable[source] - self.readable.get(recipient, set())
        if recipient == source or recipient in self.ghosts or not ours:
            return
        handles = data.draw(st.sets(st.sampled_from(sorted(ours, key=lambda h: h.block)), min_size=1))
        self.pool.share(source, recipient, tuple(handles))
        self.admit(recipient)
        self.readable[recipient] |= handles

    @precondition(lambda self: bool(self.live()))
    @rule(data=st.data())
    def pin(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.live()))
        self.pool.pin(holder)
        self.pins[holder] += 1

    @precondition(lambda self: any(self.pins.values()))
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from([h for h in self.known() if self.pins[h]]))
        freed = self.pool.unpin(holder)
        self.pins[holder] -= 1
        if holder in self.ghosts and not self.pins[holder]:
            self.forget(holder, freed)
        else:
            assert freed == ()

    @precondition(lambda self: bool(self.live()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        holder = data.draw(st.sampled_from(self.live()))
        freed = self.pool.release(holder)
        self.reserved[holder] = 0
        if self.pins[holder]:
            assert freed == ()
            self.ghosts.add(holder)
        else:
            self.forget(holder, freed)

    @rule(holder=holders)
    def misuse_changes_nothing(self, holder: HolderId) -> None:
        before = self.pool.key()
        if holder not in self.reserved or holder in self.ghosts:
            with pytest.raises(AssertionError):
                self.pool.release(holder)
            with pytest.raises(AssertionError):
                self.pool.take(holder, 1)
            with pytest.raises(AssertionError):
                self.pool.pin(holder)
        else:
            with pytest.raises(AssertionError):
                self.pool.take(holder, self.reserved[holder] + 1)
            for handle in [*self.stale[-2:], *self.readable[holder]]:
                with pytest.raises(AssertionError):
                    self.pool.publish(holder, [handle])
        assert self.pool.key() == before

    @invariant()
    def counts_agree_with_the_model(self) -> None:
        self.pool.check()
        filling, readable = set().union(*self.filling.values()), set().union(*self.readable.values())
        reserved = sum(self.reserved.values())
        free = NUM_BLOCKS - len(filling) - len(readable) - reserved
        assert self.pool.counts() == PoolCounts(free, reserved, len(filling), len(readable), NUM_BLOCKS)
        for handle in readable:
            assert self.pool.is_shared(handle) == (sum(handle in mine for mine in self.readable.values()) > 1)
        for holder in self.known():
            assert set(self.pool.handles(holder)) == self.filling[holder] | self.readable[holder]
            assert self.pool.num_reserved(holder) == self.reserved[holder]

    @invariant()
    def a_copy_is_equal_and_independent(self) -> None:
        twin = self.pool.copy()
        assert twin == self.pool
        assert hash(twin.key()) == hash(self.pool.key())
        before = self.pool.key()
        for holder in self.live():
            twin.release(holder)
        assert self.pool.key() == before
        assert (twin == self.pool) == (not self.live())

    def teardown(self) -> None:
        for holder in self.live():
            self.release_everything(holder)
        for holder in self.known():
            while self.pins[holder] > 1:
                self.pool.unpin(holder)
                self.pins[holder] -= 1
            self.forget(holder, self.pool.unpin(holder))
        assert self.pool.counts().free == NUM_BLOCKS

    def release_everything(self, holder: HolderId) -> None:
        freed = self.pool.release(holder)
        if self.pins[holder]:
            self.ghosts.add(holder)
        else:
            self.forget(holder, freed)


PoolMachine.TestCase.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.filter_too_much]
)
TestPoolAgainstModel = PoolMachine.TestCase


def test_a_reservation_is_all_or_nothing_and_counts_earlier_ones() -> None:
    pool = BlockPool(NUM_BLOCKS)
    assert pool.reserve(A, 8)
    assert not pool.reserve(B, 5)
    with pytest.raises(UnknownHolder):
        pool.num_reserved(B)
    assert pool.reserve(B, 4)
    assert pool.counts() == PoolCounts(free=0, reserved=12, filling=0, readable=0, total=12)


def test_take_prefers_the_lowest_consecutive_run() -> None:
    pool, _ = filled(3)
    pool.reserve(B, 2)
    pool.take(B, 2)
    pool.reserve(C, 2)
    pool.take(C, 2)
    assert pool.release(B) == (3, 4)
    pool.reserve(B, 6)
    assert [handle.block for handle in pool.take(B, 3)] == [7, 8, 9]
    assert [handle.block for handle in pool.take(B, 1)] == [3]
    assert [handle.block for handle in pool.take(B, 2)] == [10, 11]


def test_a_double_release_is_an_assertion() -> None:
    pool, _ = filled(2)
    pool.release(A)
    with pytest.raises(AssertionError):
        pool.release(A)
    with pytest.raises(KeyError, match="holder 1 has nothing"):
        pool.release(A)


def test_a_release_while_pinned_waits_for_the_last_unpin_but_gives_the_reservation_back_at_once() -> None:
    pool, handles = filled(2)
    pool.reserve(A, 5)
    pool.pin(A)
    pool.pin(A)
    assert pool.release(A) == ()
    assert pool.counts() == PoolCounts(free=10, reserved=0, filling=2, readable=0, total=12)
    for misuse in (
        lambda: pool.release(A),
        lambda: pool.pin(A),
        lambda: pool.reserve(A, 1),
        lambda: pool.publish(A, handles),
    ):
        with pytest.raises(AssertionError):
            misuse()
    assert pool.unpin(A) == ()
    assert pool.unpin(A) == (0, 1)
    with pytest.raises(AssertionError):
        pool.unpin(A)


def test_a_stale_handle_is_an_assertion_even_for_the_new_holder() -> None:
    pool, old = filled(1)
    pool.release(A)
    pool.reserve(A, 1)
    (new,) = pool.take(A, 1)
    assert new.block == old[0].block
    with pytest.raises(AssertionError, match="stale handle"):
        pool.publish(A, old)
    pool.publish(A, [new])


def test_filling_blocks_cannot_be_shared_and_foreign_ones_not_published() -> None:
    pool, handles = filled(2)
    pool.reserve(B, 1)
    with pytest.raises(AssertionError, match="not readable"):
        pool.share(A, B, handles)
    with pytest.raises(AssertionError, match="not being filled"):
        pool.publish(B, handles)


def test_a_shared_block_stays_until_its_last_holder_goes() -> None:
    pool, handles = filled(2)
    pool.publish(A, handles)
    pool.share(A, B, handles[:1])
    assert [pool.is_shared(handle) for handle in handles] == [True, False]
    assert pool.release(A) == (1,)
    assert not pool.is_shared(handles[0])
    assert pool.release(B) == (0,)
    assert pool.counts().free == NUM_BLOCKS


def test_check_finds_a_block_that_was_lost() -> None:
    pool, _ = filled(1)
    pool._free.pop()
    with pytest.raises(AssertionError, match="lost"):
        pool.check()


def test_pools_differ_by_state_holder_pin_and_generation() -> None:
    pool, handles = filled(2)
    changes: tuple[Callable[[BlockPool], object], ...] = (
        lambda twin: twin.publish(A, handles[1:]),
        lambda twin: twin.pin(A),
        lambda twin: twin.reserve(A, 1),
        lambda twin: twin.reserve(B, 0),
        lambda twin: twin.release(A),
    )
    for change in changes:
        twin = pool.copy()
        change(twin)
        assert twin != pool
        assert twin.key() != pool.key()
    fresh, used = BlockPool(NUM_BLOCKS), pool.copy()
    used.release(A)
    assert used.counts() == fresh.counts()
    assert used != fresh


def test_a_pool_is_no_dictionary_key() -> None:
    with pytest.raises(TypeError):
        hash(BlockPool(1))
    assert BlockPool(1) != "pool"


def test_copying_and_comparing_a_small_pool_takes_microseconds() -> None:
    pool, handles = filled(4)
    pool.publish(A, handles[:2])
    best = min(_seconds(lambda: pool.copy() == pool and hash(pool.key())) for _ in range(50))
    assert best < 200e-6


def _seconds(action: object) -> float:
    start = time.perf_counter()
    assert callable(action)
    action()
    return time.perf_counter() - start
