"""What one forward pass is asked to do: steps of many sequences, packed into one row of tokens.

A step brings any number of new tokens of one sequence; a whole prompt, a chunk of one and a single decoded token differ only in
that number. Packing computes once, for the whole pass, where every new token goes:

    steps          A: 3 new tokens        B: 1 new       C: 2 new
    packed row     a5   a6   a7           b41            c0   c1
    position       5    6    7            41             0    1
    destination    (block, slot) by the sequence's own block table

Never: touches a tensor or the storage.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from kvlease.engine.past import PastTokens
from kvlease.kvcache.ledger import ReadableBlocks
from kvlease.sampling.params import SamplingParams

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Draw:
    """One token that is wanted behind a step's tokens: how it is drawn, and the ids that it must not be.

    `past`: the tokens before it, where the parameters penalise any.
    """

    params: SamplingParams
    banned: frozenset[int] = frozenset()
    past: PastTokens | None = None

    def __post_init__(self) -> None:
        """Refuse a penalty on tokens that nobody knows."""
        assert self.past is not None or not self.params.penalises, "a penalty needs the tokens before"

    @property
    def known_past(self) -> PastTokens:
        """The tokens before, where there is a penalty."""
        assert self.past is not None, "only penalties look at the past"
        return self.past


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """New tokens of one sequence, to stand at positions `context.num_tokens` onwards; `context.table` must have room for them.

    `draws`: the tokens that are wanted, one for each text that begins here; none in every chunk of a prompt but the last.
    """

    context: ReadableBlocks
    token_ids: tuple[int, ...]
    draws: tuple[Draw, ...] = ()

    @property
    def num_tokens(self) -> int:
        """The sequence's length after this step; also the position of the tokens that it draws."""
        return self.context.num_tokens + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class PackedSequence:
    """One step's share of the row: tokens `first..last-1`, attending to `num_tokens` positions in the blocks of `table`."""

    first: int
    last: int
    num_tokens: int
    table: IntArray  # [blocks that hold num_tokens]

    @property
    def num_new(self) -> int:
        """New tokens of this step."""
        return self.last - self.first

    @property
    def is_whole(self) -> bool:
        """Nothing came before these tokens."""
        return self.num_new == self.num_tokens

    @property
    def is_consecutive(self) -> bool:
        """The blocks lie one behind the other, so that their slots can be seen without copying them."""
        return bool(self.table[-1] - self.table[0] == self.table.size - 1 and (np.diff(self.table) == 1).all())


@dataclass(frozen=True, slots=True)
class PackedBatch:
    """The row and its destinations; every array has one entry for each new token."""

    steps: tuple[SequenceStep, ...]
    sequences: tuple[PackedSequence, ...]  # one for each step, in their order
    token_ids: IntArray
    positions: IntArray
    blocks: IntArray
    slots: IntArray

    @property
    def sampled(self) -> tuple[int, ...]:
        """Indices of the steps that want tokens."""
        return tuple(i for i, step in enumerate(self.steps) if step.draws)


def pack(steps: Sequence[SequenceStep], block_size: int) -> PackedBatch:
    """Lay the steps one behind the other. A step without tokens or without room is a mistake of ours."""
    assert steps, "a pass needs at least one step"
    sequences: list[PackedSequence] = []
    first = 0
    for step in steps:
        sequences.append(_place(step, first, block_size))
        first = sequences[-1].last
    positions = np.concatenate([np.arange(s.num_tokens - s.num_new, s.num_tokens, dtype=np.int64) for s in sequences])
    owners = np.repeat(np.arange(len(sequences)), [s.num_new for s in sequences])
    starts = np.cumsum([0, *(s.table.size for s in sequences[:-1])])
    blocks = np.concatenate([s.table for s in sequences])[starts[owners] + positions // block_size]
    slots = positions % block_size
    token_ids = np.fromiter((token for step in steps for token in step.token_ids), np.int64, first)
    return PackedBatch(tuple(steps), tuple(sequences), token_ids, positions, blocks, slots)


def _place(step: SequenceStep, first: int, block_size: int) -> PackedSequence:
    context = step.context
    assert isinstance(context, ReadableBlocks), f"a step's context must be proven, got {type(context).__name__}"
    assert step.token_ids, f"sequence {context.sequence_id}: a step without tokens"
    num_blocks = -(-step.num_tokens // block_size)
    assert num_blocks <= len(context.table), (
        f"sequence {context.sequence_id}: {step.num_tokens} tokens in {len(context.table)} blocks of {block_size}"
    )
    table = np.array(context.table[:num_blocks], dtype=np.int64)
    return PackedSequence(first, first + len(step.token_ids), step.num_tokens, table)
