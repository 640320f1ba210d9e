"""Landing: whatever is in the ring, at whatever moment, only verified bytes become readable, in the table alone."""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.kvcache.canonical import HostWindow, SlotRun
from kvlease.kvcache.departure import DepartureLease, seal_block
from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.landing import Expectation, Landed, Refused, land_block, peek_lease
from kvlease.kvcache.layout import Layout, attention_layout
from kvlease.kvcache.ledger import IntArray, SlotLedger
from kvlease.kvcache.seal import SEAL_BYTES, Seal, chain_hashes, sealed_block_bytes
from kvlease.kvcache.storage import KVStorage

LAYOUT = attention_layout(2, 2, 3, "float32")
TOKENS = tuple(range(100, 110))
REMAINS = 0xEE  # what an earlier tenant left in the receiving pool
SEQUENCE = 7


class Source:
    """A sender's pool with one computed prompt."""

    def __init__(
        self,
        layout: Layout = LAYOUT,
        block_size: int = 4,
        tokens: Sequence[int] = TOKENS,
        wire: int = 4,
        *,
        staged: bool = False,
    ) -> None:
        num_blocks = -(-len(tokens) // block_size) + 3
        self.storage = KVStorage(layout, num_blocks, block_size, staged=staged)
        generator = torch.Generator().manual_seed(3)
        for layer, specs in enumerate(layout.layers):
            for spec in specs:
                self.storage.array(layer, spec.name).view(torch.uint8).random_(0, 256, generator=generator)
        self.table = tuple(random.Random(5).sample(range(num_blocks), num_blocks - 3))
        self.num_tokens = len(tokens)
        ledger = SlotLedger(num_blocks, block_size)
        blocks, slots = ledger.locate(self.table, 0, self.num_tokens)
        ledger.begin_write(blocks, slots)
        ledger.record_computed(1, blocks, slots, np.arange(self.num_tokens))
        self.computed = ledger.computed(1, self.table, self.num_tokens)
        chains = chain_hashes(tokens, wire)
        self.lease = DepartureLease(b"l" * 16, b"n" * 16, layout.fingerprint(b"m" * 16), chains, wire)

    @property
    def num_blocks(self) -> int:
        return len(self.lease.chains)

    def sealed(self, block: int, **changes: Any) -> bytearray:
        slot = bytearray(sealed_block_bytes(self.storage.layout, self.lease.wire_block_size))
        seal_block(self.storage, self.computed, dataclasses.replace(self.lease, **changes), block, memoryview(slot))
        return slot

    def resealed(self, block: int, **changes: Any) -> bytearray:
        """A block under a good tag that claims something else."""
        slot = self.sealed(block)
        seal = Seal.unpack(slot)
        assert isinstance(seal, Seal)
        slot[:SEAL_BYTES] = dataclasses.replace(seal, **changes).pack()
        return slot


class Target:
    """A receiver's pool full of an earlier tenant's remains, and a table of scrubbed blocks in it."""

    def __init__(self, source: Source, block_size: int = 4, *, staged: bool = False) -> None:
        lease, tokens = source.lease, source.num_tokens
        num_blocks = -(-tokens // block_size) + 3
        self.storage = SpoiledStorage(source.storage.layout, num_blocks, block_size, staged=staged)
        self.ledger = SpoiledLedger(num_blocks, block_size)
        self.table = tuple(random.Random(9).sample(range(num_blocks), num_blocks - 3))
        self.others = tuple(block for block in range(num_blocks) if block not in self.table)
        for layer, specs in enumerate(source.storage.layout.layers):
            for spec in specs:
                self.storage.array(layer, spec.name).view(torch.uint8).fill_(REMAINS)
        self.storage.scrub(self.table)
        self.ledger.clear(self.table)
        self.expectation = Expectation(
            lease.lease_id, lease.nonce, lease.fingerprint, lease.chains, tokens, lease.wire_block_size
        )

    def land(self, slot: bytes | bytearray | memoryview) -> Landed | Refused:
        return land_block(self.storage, self.ledger, SEQUENCE, self.table, self.expectation, memoryview(slot))

    def content(self) -> bytes:
        return bytes(self.storage.read_canonical(self.table, 0, self.expectation.num_tokens))

    def has(self, source: Source, position: int) -> bool:
        wire = source.lease.wire_block_size
        extent = (position * wire, self.expectation.num_valid(position))
        mine = self.storage.read_canonical(self.table, *extent)
        return mine == source.storage.read_canonical(source.table, *extent)

    def proven(self) -> list[bool]:
        """Which positions are readable, whatever is before them."""
        return [self._is_proven(position) for position in range(self.expectation.num_tokens)]

    def _is_proven(self, position: int) -> bool:
        try:
            self.ledger.require(SEQUENCE, self.table, position, 1)
        except UnprovenSlot:
            return False
        return True

    def check_others_untouched(self) -> None:
        size = self.storage.block_size
        for block in self.others:
            content = self.storage.read_canonical((block,), 0, size)
            spans = self.storage.layout.spans(size)
            assert all(set(content[s.offset_bytes : s.offset_bytes + s.num_bytes]) == {REMAINS} for s in spans)


class SpoiledArrays(Sequence[memoryview]):
    """Runs an action when the copy comes to each array."""

    def __init__(self, arrays: Sequence[memoryview], actions: dict[int, Callable[[], None]]) -> None:
        self._arrays, self._actions = arrays, actions

    def __len__(self) -> int:
        return len(self._arrays)

    def __getitem__(self, index: int) -> memoryview:  # type: ignore[override]
        return self._arrays[index]

    def __iter__(self) -> Iterator[memoryview]:
        for index, array in enumerate(self._arrays):
            self._actions.get(index, nothing)()
            yield array


class SpoiledStorage(KVStorage):
    """A storage whose landing can be interrupted."""

    during: dict[int, Callable[[], None]] = {}  # noqa: RUF012
    after_digest: Callable[[], None] | None = None

    def write_window(self, runs: tuple[SlotRun, ...]) -> HostWindow:
        window = super().write_window(runs)
        return dataclasses.replace(window, arrays=SpoiledArrays(window.arrays, self.during))

    def settle(self, window: HostWindow, runs: tuple[SlotRun, ...]) -> None:
        if self.after_digest:
            self.after_digest()
        super().settle(window, runs)


class SpoiledLedger(SlotLedger):
    """A ledger whose landing can be interrupted between the decision about the header and the copy of the content."""

    before_copy: Callable[[], None] | None = None

    def begin_write(self, blocks: IntArray, slots: IntArray) -> None:
        super().begin_write(blocks, slots)
        if self.before_copy:
            self.before_copy()


def nothing() -> None: ...


# -- what is good arrives


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("ours", "theirs", "wire"), [*product((8, 16, 32), repeat=3)])
def test_a_prompt_arrives_bit_for_bit(dtype: str, ours: int, theirs: int, wire: int) -> None:
    source = Source(attention_layout(3, 2, 5, dtype), theirs, range(75), wire)
    target = Target(source, ours)
    order = random.Random(wire).sample(range(source.num_blocks), source.num_blocks)
    for position in order:
        assert target.land(source.sealed(position)) == Landed(position, target.expectation.num_valid(position))
    readable = target.ledger.readable(SEQUENCE, target.table, 75)
    assert readable.num_tokens == 75
    assert target.content() == source.storage.read_canonical(source.table, 0, 75)
    target.check_others_untouched()
    with pytest.raises(UnprovenSlot):
        target.ledger.computed(SEQUENCE, target.table, 1)


@pytest.mark.parametrize(("ours", "theirs", "wire"), [(8, 16, 8), (16, 8, 8), (8, 8, 8)])
def test_a_prompt_arrives_through_staging_buffers_on_both_sides(ours: int, theirs: int, wire: int) -> None:
    source = Source(attention_layout(3, 2, 5, "bfloat16"), theirs, range(43), wire, staged=True)
    target = Target(source, ours, staged=True)
    for position in range(source.num_blocks):
        assert isinstance(target.land(source.sealed(position)), Landed)
    target.ledger.readable(SEQUENCE, target.table, 43)
    assert target.content() == source.storage.read_canonical(source.table, 0, 43)
    target.check_others_untouched()


def test_only_the_tokens_of_a_landed_block_become_readable() -> None:
    source = Source()
    target = Target(source)
    assert target.land(source.sealed(1)) == Landed(1, 4)
    assert target.proven() == [False] * 4 + [True] * 4 + [False] * 2
    with pytest.raises(UnprovenSlot):
        target.ledger.readable(SEQUENCE, target.table, 1)
    target.land(source.sealed(0))
    target.land(source.sealed(2))
    target.ledger.readable(SEQUENCE, target.table, 10)
    with pytest.raises(UnprovenSlot):
        target.ledger.readable(SEQUENCE, target.table, 11)


def test_a_one_token_delivery_makes_one_token_readable() -> None:
    source = Source(tokens=TOKENS[:1])
    target = Target(source)
    assert target.land(source.sealed(0)) == Landed(0, 1)
    assert target.proven() == [True]
    with pytest.raises(UnprovenSlot):
        target.ledger.readable(SEQUENCE, target.table, 2)


# -- what is bad is refused, and says why


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize(
    ("check", "make"),
    [
        ("lease", lambda source: source.sealed(1, lease_id=b"x" * 16)),
        ("nonce", lambda source: source.sealed(1, nonce=b"x" * 16)),
        ("fingerprint", lambda source: source.sealed(1, fingerprint=b"x" * 16)),
        ("chain", lambda source: source.resealed(1, chain=b"x" * 16)),
        ("chain", lambda source: source.resealed(1, position=0)),
        ("position", lambda source: source.resealed(1, position=3)),
        ("position", lambda source: source.resealed(1, position=2**64 - 1)),
        ("valid_tokens", lambda source: source.resealed(1, num_valid=3)),
        ("valid_tokens", lambda source: source.resealed(2, num_valid=4)),
        ("valid_tokens", lambda source: source.resealed(1, num_valid=0)),
        ("valid_tokens", lambda source: source.resealed(1, num_valid=2**32 - 1)),
        ("digest", lambda source: source.resealed(1, digest=b"x" * 16)),
        ("length", lambda source: source.sealed(1)[:-1]),
        ("length", lambda source: source.sealed(1)[:SEAL_BYTES]),
        ("length", lambda source: source.sealed(1)[:10]),
        ("length", lambda source: bytearray()),
        ("length", lambda source: source.sealed(1) + bytes(64)),
        ("magic", lambda source: bytearray(len(source.sealed(1)))),
        ("magic", lambda source: bytearray(SEAL_BYTES) + source.sealed(1)[SEAL_BYTES:]),
    ],
)
def test_a_wrong_block_is_refused_by_the_check_that_names_it(
    check: str, make: Callable[[Source], bytearray], *, staged: bool
) -> None:
    source = Source()
    target = Target(source, staged=staged)
    outcome = target.land(make(source))
    assert isinstance(outcome, Refused)
    assert outcome.check == check
    assert not any(target.proven())
    target.check_others_untouched()


@pytest.mark.parametrize("index", range(SEAL_BYTES))
def test_every_byte_of_the_header_matters(index: int) -> None:
    source = Source()
    target = Target(source)
    slot = source.sealed(2)
    slot[index] ^= 0x10
    outcome = target.land(slot)
    expected = "magic" if index < 8 else "version" if index < 10 else "algorithm" if index < 12 else "tag"
    assert isinstance(outcome, Refused)
    assert outcome.check == expected
    assert not any(target.proven())


@pytest.mark.parametrize(("ours", "staged"), [(4, False), (3, False), (4, True)])
def test_every_byte_of_the_content_matters_padding_included(ours: int, *, staged: bool) -> None:
    source = Source()
    target = Target(source, ours, staged=staged)
    clean = source.sealed(2)
    for index in range(SEAL_BYTES, len(clean)):
        slot = clean.copy()
        slot[index] ^= 0x10
        outcome = target.land(slot)
        assert isinstance(outcome, Refused)
        assert outcome.check == "digest"
    assert not any(target.proven())
    target.check_others_untouched()
    assert target.land(clean) == Landed(2, 2)


def test_no_message_shows_a_nonce() -> None:
    source = Source()
    outcome = Target(source).land(source.sealed(0, nonce=b"secret nonce 16."))
    assert isinstance(outcome, Refused)
    assert b"secret nonce 16.".hex() not in outcome.message
    assert source.lease.nonce.hex() not in outcome.message


def test_padding_sealed_with_remains_in_it_is_refused() -> None:
    source = Source()
    target = Target(source)
    slot = source.sealed(2)
    for span in LAYOUT.spans(4):
        slot[SEAL_BYTES + span.offset_bytes + span.num_bytes - 1] = 0x55
    resealed = dirty_seal(slot)
    outcome = target.land(resealed)
    assert isinstance(outcome, Refused)
    assert (outcome.check, "padding" in outcome.message) == ("digest", True)
    assert not any(target.proven())


def dirty_seal(slot: bytearray) -> bytearray:
    """Seal these bytes as they are, as a sender with a fault might."""
    seal = Seal.unpack(slot)
    assert isinstance(seal, Seal)
    digest = xxhash.xxh3_128(slot[SEAL_BYTES:]).digest()
    return bytearray(dataclasses.replace(seal, digest=digest).pack()) + slot[SEAL_BYTES:]


def test_a_block_that_landed_is_refused_the_second_time_and_stays_readable() -> None:
    source = Source()
    target = Target(source, 3)
    assert isinstance(target.land(source.sealed(1)), Landed)
    outcome = target.land(source.sealed(1))
    assert isinstance(outcome, Refused)
    assert outcome.check == "duplicate"
    assert target.proven() == [False] * 4 + [True] * 4 + [False] * 2
    assert target.has(source, 1)
    assert isinstance(target.land(source.sealed(0)), Landed)


def test_a_spoiled_duplicate_does_not_touch_what_landed() -> None:
    source = Source()
    target = Target(source)
    target.land(source.sealed(1))
    slot = source.sealed(1)
    slot[-200] ^= 1
    assert isinstance(target.land(slot), Refused)
    assert target.has(source, 1)


def test_a_refused_block_lies_in_unproven_slots_and_a_good_one_may_follow() -> None:
    source = Source()
    target = Target(source)
    slot = source.sealed(1)
    slot[-1 - 16] ^= 1  # in the last array: all before it have been copied when it is found
    assert isinstance(target.land(slot), Refused)
    assert any(target.storage.read_canonical(target.table, 4, 4))
    with pytest.raises(UnprovenSlot):
        target.ledger.require(SEQUENCE, target.table, 4, 1)
    assert isinstance(target.land(source.sealed(1)), Landed)
    assert target.has(source, 1)


@given(
    st.lists(st.tuples(st.integers(0, 1 << 14), st.binary(min_size=1, max_size=80)), min_size=1, max_size=4), st.data()
)
@settings(max_examples=200, deadline=None)
def test_any_damage_is_refused_or_changes_nothing(damage: list[tuple[int, bytes]], data: st.DataObject) -> None:
    source = Source(block_size=data.draw(st.sampled_from([3, 4, 5])))
    target = Target(source, data.draw(st.sampled_from([3, 4, 5])))
    position = data.draw(st.integers(0, 2))
    clean = source.sealed(position)
    slot = clean.copy()
    for place, noise in damage:
        start = place % len(slot)
        fitting = noise[: len(slot) - start]
        slot[start : start + len(fitting)] = fitting
    outcome = target.land(slot)
    if isinstance(outcome, Landed):
        assert slot == clean
        assert target.has(source, position)
    else:
        assert not any(target.proven())
    target.check_others_untouched()


# -- stray writes while a block is being landed


def moments(target: Target, action: Callable[[], None]) -> dict[str, Callable[[], None]]:
    """How to have `action` done at each moment of a landing."""

    def during(index: int) -> None:
        target.storage.during = {index: action}

    def before_copy() -> None:
        target.ledger.before_copy = action

    def after_digest() -> None:
        target.storage.after_digest = action

    inside = {f"before array {index}": (lambda index=index: during(index)) for index in range(4)}
    return {"before copy": before_copy, **inside, "after digest": after_digest}


MOMENTS = ["before copy", *(f"before array {index}" for index in range(4)), "after digest"]


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("ours", [3, 4])
@pytest.mark.parametrize("moment", MOMENTS)
def test_a_stray_write_at_any_moment_never_becomes_readable(moment: str, ours: int, *, staged: bool) -> None:
    source = Source()
    spans = LAYOUT.spans(4)
    victims = [0, 20, 250, *(SEAL_BYTES + span.offset_bytes + 5 for span in spans)]
    outcomes = set()
    for victim in victims:
        target = Target(source, ours, staged=staged)
        slot = source.sealed(1)

        def stray(slot: bytearray = slot, victim: int = victim) -> None:
            slot[victim : victim + 8] = b"\x5a" * 8

        moments(target, stray)[moment]()
        outcome = target.land(slot)
        outcomes.add(type(outcome))
        if isinstance(outcome, Landed):
            assert target.has(source, 1)
            assert target.proven() == [False] * 4 + [True] * 4 + [False] * 2
        else:
            assert outcome.check == "digest"
            assert not any(target.proven())
        target.check_others_untouched()
    assert outcomes == ({Landed} if moment == "after digest" else {Landed, Refused})


@pytest.mark.parametrize("moment", MOMENTS)
def test_the_header_may_change_after_it_was_copied_and_decides_nothing_more(moment: str) -> None:
    source = Source()
    target = Target(source)
    slot, other = source.sealed(1), source.sealed(0)

    def swap_header() -> None:
        slot[:SEAL_BYTES] = other[:SEAL_BYTES]

    moments(target, swap_header)[moment]()
    assert target.land(slot) == Landed(1, 4)
    assert target.has(source, 1)
    assert target.proven() == [False] * 4 + [True] * 4 + [False] * 2


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_whole_other_block_written_over_it_is_not_mixed_in(moment: str) -> None:
    source = Source()
    target = Target(source)
    slot, other = source.sealed(1), source.sealed(0)

    def overwrite() -> None:
        slot[:] = other

    moments(target, overwrite)[moment]()
    outcome = target.land(slot)
    assert target.has(source, 1) if isinstance(outcome, Landed) else not any(target.proven())
    assert isinstance(outcome, Landed) == (moment == "after digest")


def test_a_thread_that_writes_into_the_ring_all_the_time_spoils_blocks_but_no_read() -> None:
    source = Source(attention_layout(4, 2, 64, "float32"), 16, range(32), 16)
    target = Target(source, 16)
    clean, other = (np.frombuffer(source.sealed(position), dtype=np.uint8) for position in (0, 1))
    slot = clean.copy()
    stop = threading.Event()

    def overwrite() -> None:
        while not stop.is_set():
            for block in (clean, clean, other):
                slot[:] = block  # outside the interpreter's lock, so it tears the reads of the other thread

    thread = threading.Thread(target=overwrite)
    thread.start()
    outcomes = set()
    try:
        for attempt in range(20_000):
            outcome = target.land(slot.data)
            outcomes.add(type(outcome))
            if isinstance(outcome, Landed):
                assert target.has(source, outcome.position)
                target.ledger.clear(target.table)
            assert not any(target.proven())
            if attempt >= 500 and outcomes == {Landed, Refused}:
                break
    finally:
        stop.set()
        thread.join()
    assert outcomes == {Landed, Refused}
    target.check_others_untouched()


# -- faults of our own are assertions, before a byte is copied


def test_a_table_that_leads_to_another_sequence_is_an_assertion_and_spoils_nothing() -> None:
    source = Source()
    target = Target(source)
    target.ledger.record_verified(8, target.table[1:2], 0, 4)
    before = target.content()
    with pytest.raises(AssertionError, match="another"):
        target.land(source.sealed(1))
    assert target.content() == before
    target.ledger.readable(8, target.table[1:2], 4)


def test_a_table_that_names_a_block_twice_is_an_assertion() -> None:
    source = Source()
    target = Target(source)
    target.table = (target.table[0], target.table[0], target.table[2])
    assert isinstance(target.land(source.sealed(0)), Landed)
    with pytest.raises(AssertionError):
        target.land(source.sealed(1))
    assert target.has(source, 0)


@pytest.mark.parametrize("table", [(0, 1), (), (0, 1, 99), (0, 1, -1)])
def test_a_table_too_short_or_outside_the_pool_is_an_assertion(table: tuple[int, ...]) -> None:
    source = Source()
    target = Target(source)
    target.table = table
    with pytest.raises(AssertionError):
        target.land(source.sealed(2))


def test_another_pools_ledger_is_an_assertion() -> None:
    source = Source()
    target = Target(source)
    target.ledger = SpoiledLedger(target.ledger.num_blocks, 5)
    with pytest.raises(AssertionError):
        target.land(source.sealed(0))


def test_an_expectation_that_cannot_be_met_is_refused() -> None:
    good = Target(Source()).expectation
    wrong: list[dict[str, Any]] = [
        {"num_tokens": 0},
        {"num_tokens": 13},
        {"lease_id": b"x"},
        {"chains": (b"x",) * 3},
        {"wire_block_size": 0},
    ]
    for changes in wrong:
        with pytest.raises(ValueError, match=r"bytes|blocks|tokens"):
            dataclasses.replace(good, **changes)


def test_the_lease_of_a_block_can_be_looked_up_before_anything_is_verified() -> None:
    slot = Source().sealed(0)
    assert peek_lease(memoryview(slot)) == b"l" * 16
    slot[100] ^= 1
    assert peek_lease(memoryview(slot)) == b"l" * 16
    assert peek_lease(memoryview(bytes(len(slot)))) is None
    assert peek_lease(memoryview(b"")) is None
