"""What is known of every token slot of a private pool: whose it is, which position it holds, and what proved it.

    unproven ──begin_write──▶ unproven ──record_computed / record_verified──▶ proven for (sequence, position)
        ▲                                                                          │
        └───────────────────────── clear, begin_write ─────────────────────────────┘

A slot is readable for a sequence if the bytes in it were made for that sequence and that position, by a verified copy
from a landing ring or by this engine's own forward pass. `ReadableBlocks` and `ComputedBlocks` state that such a check
was made for all of 0..num_tokens-1, and can be made nowhere else; attention takes the one, sealing the other.

Never: takes a caller's word for a slot, or proves a slot that was not unproven first.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import InitVar, dataclass, field
from enum import Enum, IntEnum

import numpy as np
from numpy.typing import NDArray

from kvlease.kvcache.errors import UnprovenSlot
from kvlease.kvcache.layout import check_block_size

IntArray = NDArray[np.int64]

_MINT = object()
_NOBODY = -1


class SlotKind(IntEnum):
    """What proved a slot."""

    UNPROVEN = 0
    COMPUTED = 1
    VERIFIED = 2


class Occupancy(Enum):
    """What stands in the slots that a block is about to be landed in."""

    VACANT = "vacant"  # nothing proven: it may land
    OWN = "own"  # this sequence has some of these positions already
    FOREIGN = "foreign"  # something else is proven there: the block table is wrong


@dataclass(frozen=True, slots=True)
class ReadableBlocks:
    """Proof that the tokens 0..num_tokens-1 of `sequence_id` lie in the blocks of `table`, made by a ledger alone."""

    sequence_id: int
    table: tuple[int, ...]
    num_tokens: int
    _ledger: SlotLedger = field(repr=False, compare=False)
    mint: InitVar[object]

    def __post_init__(self, mint: object) -> None:
        """Refuse to be made by anybody else."""
        if mint is not _MINT:
            raise TypeError("ReadableBlocks are made by SlotLedger.readable alone")

    def confirm(self) -> None:
        """Check again that the proof still holds; raises `UnprovenSlot` if the blocks were cleared or written since."""
        self._ledger.readable(self.sequence_id, self.table, self.num_tokens)


@dataclass(frozen=True, slots=True)
class ComputedBlocks:
    """The same, and that this engine's own forward pass made every one of these tokens."""

    sequence_id: int
    table: tuple[int, ...]
    num_tokens: int
    _ledger: SlotLedger = field(repr=False, compare=False)
    mint: InitVar[object]

    def __post_init__(self, mint: object) -> None:
        """Refuse to be made by anybody else."""
        if mint is not _MINT:
            raise TypeError("ComputedBlocks are made by SlotLedger.computed alone")

    def confirm(self, first_position: int, num_tokens: int) -> None:
        """Check again, for `num_tokens` tokens from `first_position`; raises `UnprovenSlot` if it no longer holds."""
        self._ledger.require(self.sequence_id, self.table, first_position, num_tokens, computed=True)


class SlotLedger:
    """Owner, position and kind of each of `num_blocks` times `block_size` slots.

    Threads may call it at the same time as long as they work on different blocks, which the pool sees to. A sequence id
    is never used again for another sequence.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        """Nothing is proven."""
        check_block_size(block_size)
        if num_blocks <= 0:
            raise ValueError(f"a ledger needs blocks, got {num_blocks}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._owner = np.full((num_blocks, block_size), _NOBODY, dtype=np.int64)
        self._position = np.full((num_blocks, block_size), _NOBODY, dtype=np.int64)
        self._kind = np.full((num_blocks, block_size), SlotKind.UNPROVEN, dtype=np.int8)
        self._sources: dict[int, tuple[int, int]] = {}  # of an heir: whose proofs hold for it, and for how many tokens
        self._counting = np.arange(max(1024, block_size), dtype=np.int64)

    # -- recording

    def clear(self, blocks: Iterable[int]) -> None:
        """Nothing in these blocks is proven any more: called when they leave the free list."""
        rows = np.fromiter(blocks, dtype=np.int64)
        self._check_blocks(rows)
        self._owner[rows] = _NOBODY
        self._kind[rows] = SlotKind.UNPROVEN
        self._position[rows] = _NOBODY

    def begin_write(self, blocks: IntArray, slots: IntArray) -> None:
        """Make the slots `(blocks[i], slots[i])` unproven, before their bytes change. One call covers one forward pass.

        Two tokens that would be written to one slot are an `AssertionError`: neither could be trusted afterwards.
        """
        flat = self._flat(blocks, slots)
        assert len(np.unique(flat)) == len(flat), "two tokens of one pass would be written to the same slot"
        self._owner.reshape(-1)[flat] = _NOBODY
        self._kind.reshape(-1)[flat] = SlotKind.UNPROVEN
        self._position.reshape(-1)[flat] = _NOBODY

    def record_computed(self, sequence_id: int, blocks: IntArray, slots: IntArray, positions: IntArray) -> None:
        """A forward pass wrote `positions[i]` to `(blocks[i], slots[i])`. For the engine's runner alone."""
        self._record(sequence_id, self._flat(blocks, slots), np.asarray(positions, dtype=np.int64), SlotKind.COMPUTED)

    def record_verified(self, sequence_id: int, table: Sequence[int], first_position: int, num_tokens: int) -> None:
        """A copy of these positions was verified where it lies. For the landing alone."""
        blocks, slots = self.locate(table, first_position, num_tokens)
        positions = np.arange(first_position, first_position + num_tokens, dtype=np.int64)
        self._record(sequence_id, self._flat(blocks, slots), positions, SlotKind.VERIFIED)

    def record_copied(
        self, source_id: int, source_table: Sequence[int], heir_id: int, heir_table: Sequence[int], positions: range
    ) -> None:
        """The bytes of these positions were copied within the storage, from where they are proven. For `KVMemory` alone."""
        first, num_tokens = positions.start, len(positions)
        self.require(source_id, source_table, first, num_tokens)
        kinds = self._kind[self.locate(source_table, first, num_tokens)].astype(np.int64)
        blocks, slots = self.locate(heir_table, first, num_tokens)
        self._record(heir_id, self._flat(blocks, slots), np.asarray(positions, dtype=np.int64), kinds)

    def adopt(self, source_id: int, heir_id: int, table: Sequence[int], num_tokens: int) -> None:
        """What is proven for 0..num_tokens-1 of the source is from now on proven for its heir too. For `KVMemory` alone.

        They are texts of one request: the tokens are the same, and no other tenant's.
        """
        assert heir_id not in self._sources, f"sequence {heir_id} has a source already"
        assert source_id not in self._sources, f"sequence {source_id} is an heir itself"
        self.require(source_id, table, 0, num_tokens)
        self._sources[heir_id] = (source_id, num_tokens)

    def forget(self, sequence_id: int) -> None:
        """The sequence has ended: it inherits nothing any more. Harmless where it did not."""
        self._sources.pop(sequence_id, None)

    # -- asking

    def readable(self, sequence_id: int, table: Sequence[int], num_tokens: int) -> ReadableBlocks:
        """Prove 0..num_tokens-1 readable, slot by slot; raises `UnprovenSlot` naming the first one that is not."""
        self.require(sequence_id, table, 0, num_tokens)
        return ReadableBlocks(sequence_id, tuple(table), num_tokens, self, _MINT)

    def computed(self, sequence_id: int, table: Sequence[int], num_tokens: int) -> ComputedBlocks:
        """Prove 0..num_tokens-1 computed by this engine; raises `UnprovenSlot` naming the first slot that is not."""
        self.require(sequence_id, table, 0, num_tokens, computed=True)
        return ComputedBlocks(sequence_id, tuple(table), num_tokens, self, _MINT)

    def require(
        self, sequence_id: int, table: Sequence[int], first_position: int, num_tokens: int, *, computed: bool = False
    ) -> None:
        """Raise `UnprovenSlot` unless each position is proven for the sequence (`computed`: by a forward pass)."""
        assert sequence_id >= 0, f"sequence {sequence_id}"
        if num_tokens == 0:
            return
        rows, offset = self._place(table, first_position, num_tokens)
        window = slice(offset, offset + num_tokens)
        owners, positions = self._owner[rows].reshape(-1)[window], self._positions(first_position, num_tokens)
        proven = owners == sequence_id
        if sequence_id in self._sources:
            source_id, num_inherited = self._sources[sequence_id]
            proven |= (owners == source_id) & (positions < num_inherited)
        proven &= self._position[rows].reshape(-1)[window] == positions
        if computed:
            proven &= self._kind[rows].reshape(-1)[window] == SlotKind.COMPUTED
        if not proven.all():
            self._refuse(sequence_id, table, first_position + int(np.argmin(proven)), computed=computed)

    def occupancy(self, sequence_id: int, table: Sequence[int], first_position: int, num_tokens: int) -> Occupancy:
        """What is proven in the slots that these positions would be written to."""
        rows, offset = self._place(table, first_position, num_tokens)
        window = slice(offset, offset + num_tokens)
        owners = self._owner[rows].reshape(-1)[window]
        taken = owners != _NOBODY
        if not taken.any():
            return Occupancy.VACANT
        positions = self._position[rows].reshape(-1)[window]
        own = (owners == sequence_id) & (positions == self._positions(first_position, num_tokens))
        return Occupancy.OWN if bool(own[taken].all()) else Occupancy.FOREIGN

    def locate(self, table: Sequence[int], first_position: int, num_tokens: int) -> tuple[IntArray, IntArray]:
        """Block and slot of each of `num_tokens` positions from `first_position`, by the block table."""
        rows, offset = self._rows(table, first_position, num_tokens)
        slots = np.arange(offset, offset + num_tokens, dtype=np.int64)
        return rows[slots // self.block_size], slots % self.block_size

    # -- inside

    def _place(self, table: Sequence[int], first_position: int, num_tokens: int) -> tuple[int | IntArray, int]:
        """As `_rows`, with a plain number where one block holds all: one block is the common case, and far cheaper to look at."""
        first_row, offset = divmod(first_position, self.block_size)
        if not (0 <= first_row < len(table) and 0 < num_tokens <= self.block_size - offset):
            return self._rows(table, first_position, num_tokens)
        block = int(table[first_row])
        assert 0 <= block < self.num_blocks, f"block {block} of {self.num_blocks}"
        return block, offset

    def _rows(self, table: Sequence[int], first_position: int, num_tokens: int) -> tuple[IntArray, int]:
        """The blocks that hold these positions, and where the first position lies in the first of them."""
        assert first_position >= 0, f"position {first_position}"
        assert num_tokens > 0, f"{num_tokens} tokens"
        first_row, offset = divmod(first_position, self.block_size)
        last_row = (first_position + num_tokens - 1) // self.block_size
        if last_row >= len(table):
            last = first_position + num_tokens - 1
            raise UnprovenSlot(
                f"position {last} lies beyond a table of {len(table)} blocks of {self.block_size} tokens"
            )
        rows = np.array(table[first_row : last_row + 1], dtype=np.int64)
        self._check_blocks(rows)
        return rows, offset

    def _positions(self, first_position: int, num_tokens: int) -> IntArray:
        end = first_position + num_tokens
        counting = self._counting  # once: another thread may replace it by a shorter one in between
        if end > len(counting):
            counting = self._counting = np.arange(2 * end, dtype=np.int64)
        return counting[first_position:end]

    def _check_blocks(self, rows: IntArray) -> None:
        """A negative number would silently index from the end."""
        assert not len(rows) or (rows.min() >= 0 and rows.max() < self.num_blocks), (
            f"blocks {rows} of {self.num_blocks}"
        )

    def _flat(self, blocks: IntArray, slots: IntArray) -> IntArray:
        rows, columns = np.asarray(blocks, dtype=np.int64), np.asarray(slots, dtype=np.int64)
        self._check_blocks(rows)
        assert rows.shape == columns.shape, f"{rows.shape} blocks, {columns.shape} slots"
        assert not len(columns) or (columns.min() >= 0 and columns.max() < self.block_size), f"slots {columns}"
        return rows * self.block_size + columns

    def _record(self, sequence_id: int, flat: IntArray, positions: IntArray, kind: SlotKind | IntArray) -> None:
        assert sequence_id >= 0, f"sequence {sequence_id}"
        assert flat.shape == positions.shape, f"{flat.shape} slots, {positions.shape} positions"
        owner = self._owner.reshape(-1)
        assert (owner[flat] == _NOBODY).all(), f"sequence {sequence_id} would claim a slot that was not begun"
        self._position.reshape(-1)[flat] = positions
        self._kind.reshape(-1)[flat] = kind
        owner[flat] = sequence_id  # last: a slot has an owner only once everything else about it is true

    def _refuse(self, sequence_id: int, table: Sequence[int], position: int, *, computed: bool) -> None:
        row, slot = divmod(position, self.block_size)
        block = table[row]
        owner, holds = int(self._owner[block, slot]), int(self._position[block, slot])
        kind = SlotKind(int(self._kind[block, slot])).name.lower()
        found = f"{kind} for sequence {owner} at position {holds}" if owner != _NOBODY else "unproven"
        wanted = f"{'computed here' if computed else 'proven'} for sequence {sequence_id} at position {position}"
        raise UnprovenSlot(f"block {block} slot {slot} is not {wanted}: it is {found}")
