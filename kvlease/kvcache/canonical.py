"""Copying between a canonical block and token slots, with the digest taken on the private side of each copy.

A window is host memory in which each array of the layout lies slot after slot, and the runs of slots that a block's
tokens take in it. Both loops make one copy and one digest update for each array and run; where the private blocks are
consecutive, or as large as the wire's, a block is one run.

    copy_out:  slots ──copy──▶ content        copy_in:  content ──copy──▶ slots
                 └──digest                                                  └──digest

Never: reads the shared side twice, takes a digest of the shared side, or copies what lies beyond the valid tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from kvlease.kvcache.layout import Layout, aligned


@dataclass(frozen=True, slots=True)
class SlotRun:
    """Consecutive token slots, counted over all blocks of a pool: block `b` begins at slot `b * block_size`."""

    first_slot: int
    num_slots: int


@dataclass(frozen=True, slots=True)
class HostWindow:
    """For each array in canonical order its bytes, slot after slot, and the runs that hold a block's tokens, in order.

    `staging` is the one buffer behind all of them if they are a copy that still has to be moved to a device.
    """

    arrays: Sequence[memoryview]
    runs: tuple[SlotRun, ...]
    staging: bytearray | None = None


@dataclass(frozen=True, slots=True)
class WireSpan:
    """An array in a canonical block: its token slots begin at `start`, the next array or the block's end is `end`."""

    token_bytes: int
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class WirePlan:
    """A canonical block of `block_size` tokens, prepared for copying. `zeros` is as long as the longest padding."""

    block_size: int
    content_bytes: int
    spans: tuple[WireSpan, ...]
    zeros: bytes

    @staticmethod
    def of(layout: Layout, block_size: int) -> WirePlan:
        """Prepare for one wire block size; done once and kept."""
        spans = tuple(
            WireSpan(span.num_bytes // block_size, span.offset_bytes, span.offset_bytes + aligned(span.num_bytes))
            for span in layout.spans(block_size)
        )
        longest = max(span.end - span.start for span in spans)
        return WirePlan(block_size, layout.content_bytes(block_size), spans, bytes(longest))


def slot_runs(table: Sequence[int], block_size: int, first_position: int, num_tokens: int) -> tuple[SlotRun, ...]:
    """Where `num_tokens` tokens from `first_position` lie, by a table of blocks; consecutive blocks make one run."""
    assert first_position >= 0, f"position {first_position}"
    assert num_tokens > 0, f"{num_tokens} tokens"
    end = first_position + num_tokens
    assert end <= len(table) * block_size, f"position {end - 1} lies beyond {len(table)} blocks of {block_size} tokens"
    runs: list[tuple[int, int]] = []
    position = first_position
    while position < end:
        row, slot = divmod(position, block_size)
        assert table[row] >= 0, f"block {table[row]}"
        start, count = table[row] * block_size + slot, min(block_size - slot, end - position)
        if runs and sum(runs[-1]) == start:
            runs[-1] = (runs[-1][0], runs[-1][1] + count)
        else:
            runs.append((start, count))
        position += count
    return tuple(SlotRun(start, count) for start, count in runs)


def copy_out(plan: WirePlan, window: HostWindow, content: memoryview) -> bytes:
    """Fill a canonical block from the window's runs, zero the rest of it; returns the digest of what the slots hold."""
    assert len(content) == plan.content_bytes, f"{len(content)} bytes for a block of {plan.content_bytes}"
    digest = xxhash.xxh3_128()
    for span, array in zip(plan.spans, window.arrays, strict=True):
        cursor = span.start
        for run in window.runs:
            start, num_bytes = run.first_slot * span.token_bytes, run.num_slots * span.token_bytes
            source = array[start : start + num_bytes]
            content[cursor : cursor + num_bytes] = source
            digest.update(source)
            cursor += num_bytes
        if cursor < span.end:
            padding = plan.zeros[: span.end - cursor]
            content[cursor : span.end] = padding
            digest.update(padding)
    return digest.digest()


def copy_in(plan: WirePlan, window: HostWindow, content: memoryview) -> bytes | None:
    """Copy the runs' tokens out of a canonical block; returns the digest of what lies in the slots afterwards.

    `None`: the block is not zero beyond these tokens, and the copy was left unfinished.
    """
    assert len(content) == plan.content_bytes, f"{len(content)} bytes for a block of {plan.content_bytes}"
    digest = xxhash.xxh3_128()
    for span, array in zip(plan.spans, window.arrays, strict=True):
        cursor = span.start
        for run in window.runs:
            start, num_bytes = run.first_slot * span.token_bytes, run.num_slots * span.token_bytes
            target = array[start : start + num_bytes]
            target[:] = content[cursor : cursor + num_bytes]
            digest.update(target)
            cursor += num_bytes
        if cursor < span.end:
            padding = plan.zeros[: span.end - cursor]
            if bytes(content[cursor : span.end]) != padding:
                return None
            digest.update(padding)
    return digest.digest()
