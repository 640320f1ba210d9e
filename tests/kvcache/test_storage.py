"""Storage and the copies between its slots and canonical blocks."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, cast

import numpy as np
import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.kvcache.canonical import HostWindow, SlotRun, WirePlan, copy_in, copy_out, slot_runs
from kvlease.kvcache.layout import ArraySpec, Layout, attention_layout
from kvlease.kvcache.storage import KVStorage

UNEVEN = Layout(
    (
        (ArraySpec("k", (3, 5), "float32"), ArraySpec("v", (3, 5), "float32")),
        (ArraySpec("latent", (7,), "bfloat16"), ArraySpec("rope", (1,), "float16")),
    )
)


def filled(layout: Layout, num_blocks: int, block_size: int, *, staged: bool = False, seed: int = 1) -> KVStorage:
    storage = KVStorage(layout, num_blocks, block_size, staged=staged)
    generator = torch.Generator().manual_seed(seed)
    for layer, specs in enumerate(layout.layers):
        for spec in specs:
            storage.array(layer, spec.name).view(torch.uint8).random_(0, 256, generator=generator)
    return storage


def by_hand(storage: KVStorage, table: tuple[int, ...], first: int, num_tokens: int, wire: int) -> bytes:
    """The canonical block as the layout's documentation says it, token by token."""
    content = bytearray(storage.layout.content_bytes(wire))
    for span in storage.layout.spans(wire):
        array = storage.array(span.layer, span.name)
        tokens = [
            array[table[p // storage.block_size], p % storage.block_size] for p in range(first, first + num_tokens)
        ]
        piece = b"".join(token.contiguous().view(torch.uint8).numpy().tobytes() for token in tokens)
        content[span.offset_bytes : span.offset_bytes + len(piece)] = piece
    return bytes(content)


@given(
    st.permutations(range(6)).map(tuple),
    st.integers(1, 5),
    st.integers(0, 20),
    st.integers(1, 12),
)
def test_runs_name_each_slot_of_the_table_once_in_order(
    table: tuple[int, ...], block_size: int, first: int, num_tokens: int
) -> None:
    if first + num_tokens > len(table) * block_size:
        with pytest.raises(AssertionError):
            slot_runs(table, block_size, first, num_tokens)
        return
    runs = slot_runs(table, block_size, first, num_tokens)
    slots = [slot for run in runs for slot in range(run.first_slot, run.first_slot + run.num_slots)]
    positions = range(first, first + num_tokens)
    assert slots == [table[p // block_size] * block_size + p % block_size for p in positions]
    for before, after in pairwise(runs):
        assert before.first_slot + before.num_slots != after.first_slot


def test_equal_block_sizes_and_consecutive_blocks_make_one_run() -> None:
    assert slot_runs((9, 4), 16, 16, 16) == (SlotRun(64, 16),)
    assert slot_runs((3, 4, 5), 8, 0, 20) == (SlotRun(24, 20),)
    assert slot_runs((9, 4), 16, 8, 16) == (SlotRun(152, 8), SlotRun(64, 8))
    with pytest.raises(AssertionError):
        slot_runs((-1,), 16, 0, 1)


@pytest.mark.parametrize("staged", [False, True])
@pytest.mark.parametrize("layout", [UNEVEN, attention_layout(2, 3, 4, "bfloat16")])
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_a_canonical_block_is_what_the_layout_says(layout: Layout, staged: bool, data: st.DataObject) -> None:
    block_size = data.draw(st.integers(1, 5))
    storage = filled(layout, 6, block_size, staged=staged)
    table = tuple(data.draw(st.permutations(range(6))))
    first = data.draw(st.integers(0, 6 * block_size - 1))
    num_tokens = data.draw(st.integers(1, 6 * block_size - first))
    wire = data.draw(st.integers(num_tokens, num_tokens + 3))
    content = storage.read_canonical(table, first, num_tokens, wire)
    assert bytes(content) == by_hand(storage, table, first, num_tokens, wire)
    if wire == num_tokens:
        assert storage.read_canonical(table, first, num_tokens) == content


def test_both_copies_return_the_digest_of_the_whole_canonical_block() -> None:
    storage, other = filled(UNEVEN, 4, 4), KVStorage(UNEVEN, 4, 4)
    plan = WirePlan.of(UNEVEN, 6)
    content = bytearray(b"\xff" * plan.content_bytes)
    runs = slot_runs((2, 0), 4, 0, 5)
    digest = copy_out(plan, storage.read_window(runs), memoryview(content))
    assert digest == xxhash.xxh3_128(content).digest()
    assert copy_in(plan, other.write_window(runs), memoryview(content)) == digest
    assert other.read_canonical((2, 0), 0, 5, 6) == content


class WatchedArray(np.ndarray[Any, np.dtype[np.uint8]]):
    """Bytes that tell when they have been written, before anybody looks at them again."""

    written: Callable[[], None]

    def __getitem__(self, key: Any) -> Any:
        piece = super().__getitem__(key)
        piece.written = self.written
        return piece

    def __setitem__(self, key: Any, value: Any) -> None:
        super().__setitem__(key, value)
        self.written()


@pytest.mark.parametrize("victim", range(4))
def test_the_digest_is_of_what_was_copied_even_if_the_ring_is_good_again_right_after(victim: int) -> None:
    plan, runs = WirePlan.of(UNEVEN, 4), (SlotRun(0, 4),)
    clean = filled(UNEVEN, 2, 4).read_canonical((0,), 0, 4)
    ring = clean.copy()
    ring[plan.spans[victim].start] ^= 1

    def repair() -> None:
        ring[:] = clean

    arrays = []
    for span in plan.spans:
        array = np.zeros(8 * span.token_bytes, dtype=np.uint8).view(WatchedArray)
        array.written = repair if span is plan.spans[victim] else lambda: None
        arrays.append(array)
    digest = copy_in(plan, HostWindow(cast("list[memoryview]", arrays), runs), memoryview(ring))
    assert ring == clean
    copied = clean.copy()
    copied[plan.spans[victim].start] ^= 1
    assert digest == xxhash.xxh3_128(copied).digest()
    assert arrays[victim].tobytes()[0] == copied[plan.spans[victim].start]


def test_padding_that_is_not_zero_is_found_and_never_copied() -> None:
    plan = WirePlan.of(UNEVEN, 6)
    runs = slot_runs((2, 0), 4, 0, 5)
    clean = filled(UNEVEN, 4, 4).read_canonical((2, 0), 0, 5, 6)
    for span in plan.spans:
        for offset in (span.start + 5 * span.token_bytes, span.end - 1):
            spoiled, target = bytearray(clean), KVStorage(UNEVEN, 4, 4)
            spoiled[offset] = 1
            assert copy_in(plan, target.write_window(runs), memoryview(spoiled)) is None
            assert not any(target.read_canonical((0, 2, 1, 3), 1, 3))


def test_a_window_that_does_not_fit_the_plan_is_an_error() -> None:
    plan = WirePlan.of(UNEVEN, 4)
    storage = KVStorage(UNEVEN, 2, 4)
    window = storage.write_window((SlotRun(0, 4),))
    with pytest.raises(AssertionError):
        copy_in(plan, window, memoryview(bytes(plan.content_bytes - 64)))
    with pytest.raises(ValueError, match="zip"):
        copy_in(plan, HostWindow(window.arrays[:-1], window.runs), memoryview(bytes(plan.content_bytes)))
    for run in (SlotRun(5, 4), SlotRun(-1, 2), SlotRun(8, 1)):
        with pytest.raises(AssertionError):
            storage.write_window((run,))
        with pytest.raises(AssertionError):
            storage.read_window((run,))


def test_arrays_are_the_memory_itself_in_their_shape_and_dtype() -> None:
    storage = KVStorage(UNEVEN, 3, 4)
    assert storage.array(0, "k").shape == (3, 4, 3, 5)
    assert storage.array(1, "latent").dtype is torch.bfloat16
    assert storage.pool_bytes == 3 * 4 * UNEVEN.token_bytes == 3 * 4 * (2 * 60 + 14 + 2)
    storage.array(1, "latent")[2, 1] = 1.5
    assert bytes(storage.read_canonical((2,), 1, 1))[128 : 128 + 14] == np.float32(1.5).tobytes()[2:] * 7
    with pytest.raises(KeyError):
        storage.array(2, "k")


@pytest.mark.parametrize("blocks", [[0], [3, 1, 2], [4, 0, 4], []])
def test_scrubbing_zeroes_exactly_the_blocks_named(blocks: list[int]) -> None:
    storage, twin = filled(UNEVEN, 5, 3), filled(UNEVEN, 5, 3)
    storage.scrub(blocks)
    for layer, specs in enumerate(UNEVEN.layers):
        for spec in specs:
            after, before = (s.array(layer, spec.name).view(torch.uint8) for s in (storage, twin))
            for block in range(5):
                expected = torch.zeros_like(before[block]) if block in blocks else before[block]
                assert torch.equal(after[block], expected)


@pytest.mark.parametrize("block", [-1, 5])
def test_scrubbing_outside_the_pool_is_an_assertion(block: int) -> None:
    with pytest.raises(AssertionError):
        KVStorage(UNEVEN, 5, 3).scrub([block])


def test_a_staged_write_reaches_the_pool_when_it_settles() -> None:
    source, target = filled(UNEVEN, 4, 4), KVStorage(UNEVEN, 4, 4, staged=True)
    plan, runs = WirePlan.of(UNEVEN, 8), slot_runs((3, 1), 4, 2, 6)
    content = source.read_canonical((3, 1), 2, 6, 8)
    window = target.write_window(runs)
    copy_in(plan, window, memoryview(content))
    assert not any(target.read_canonical((0, 1, 2, 3), 0, 16))
    target.settle(window, runs)
    assert target.read_canonical((3, 1), 2, 6, 8) == content
    assert not any(target.read_canonical((3,), 0, 2))
    assert not any(target.read_canonical((0, 2), 0, 8))
