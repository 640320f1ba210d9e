"""A server's private KV memory: pool, ledger and storage as one, so that they can never disagree about a block.

Never: hands out a block whose slots still count as proven for its last owner, or frees one that a local thread works on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count

from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.pool import BlockHandle, BlockPool, HolderId, PoolCounts
from kvlease.kvcache.storage import KVStorage


@dataclass(frozen=True, slots=True)
class Room:
    """Blocks held for one sequence, whose id is the holder's; `table` has their ids, in order of position."""

    holder: HolderId
    handles: tuple[BlockHandle, ...]
    #: Asked for with every block that lands and every token that is decoded: made once, or a prompt would cost its length squared.
    table: tuple[int, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        """Make the table."""
        object.__setattr__(self, "table", tuple(handle.block for handle in self.handles))


class KVMemory:
    """For one event loop; threads work only on pinned rooms."""

    def __init__(self, pool: BlockPool, ledger: SlotLedger, storage: KVStorage) -> None:
        """All three of the same geometry."""
        assert pool.counts().total == ledger.num_blocks == storage.num_blocks, "three geometries"
        self.pool, self.ledger, self.storage = pool, ledger, storage
        self._holders = count(1)
        self.on_free: Callable[[], None] = lambda: None  # who waits for room; called after blocks became free

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.storage.block_size

    def counts(self) -> PoolCounts:
        """Blocks by state."""
        return self.pool.counts()

    def hold(self, num_blocks: int) -> Room | None:
        """Room for a new sequence, all or nothing; nothing in it is proven. Not scrubbed yet: see `scrub`."""
        holder = HolderId(next(self._holders))
        if not self.pool.reserve(holder, num_blocks):
            return None
        handles = self.pool.take(holder, num_blocks)
        room = Room(holder, handles)
        self.ledger.clear(room.table)
        return room

    def scrub(self, room: Room, first_block: int = 0) -> None:
        """Zero the room's blocks from `first_block` of its table on. For a thread, under a pin."""
        self.storage.scrub(room.table[first_block:])

    def branch(self, source: Room, own: Room, num_tokens: int) -> Room:
        """Room for a further text behind the first `num_tokens` tokens of `source`, in the hands of `own`'s holder.

        Whole blocks of these tokens are shared from now on. A block that the text would append to is its own: see `fill_branch`.
        """
        shared = source.handles[: num_tokens // self.block_size]
        if shared:
            self.pool.share(source.holder, own.holder, shared)
            self.ledger.adopt(source.holder, own.holder, source.table, len(shared) * self.block_size)
        return Room(own.holder, shared + own.handles)

    def fill_branch(self, source: Room, branch: Room, num_tokens: int) -> None:
        """Scrub what the branch has of its own, and copy the tokens of the block that both will append to. For a thread, under pins."""
        num_shared = num_tokens // self.block_size
        self.scrub(branch, num_shared)
        rest = range(num_shared * self.block_size, num_tokens)
        if rest:
            self.storage.copy_block(source.table[num_shared], branch.table[num_shared])
            self.ledger.record_copied(source.holder, source.table, branch.holder, branch.table, rest)

    def pin(self, rooms: Sequence[Room]) -> None:
        """A local thread begins to work on these rooms."""
        for room in rooms:
            self.pool.pin(room.holder)

    def unpin(self, rooms: Sequence[Room]) -> None:
        """It has ended. Rooms that were freed in the meantime become free blocks now."""
        freed = [self.pool.unpin(room.holder) for room in rooms]
        self._forget(rooms)
        if any(freed):
            self.on_free()

    def free(self, room: Room) -> None:
        """The sequence has ended: its blocks are free at once, or when the local thread that works on them is done."""
        freed = self.pool.release(room.holder)
        self._forget((room,))
        if freed:
            self.on_free()

    def _forget(self, rooms: Sequence[Room]) -> None:
        """A holder's inheritance ends with its holding, and not while a thread still reads by it."""
        for room in rooms:
            if not self.pool.knows(room.holder):
                self.ledger.forget(room.holder)
