"""The leases of one pair on the decode side, and what has landed under each.

A lease is the right to deliver the blocks of one attempt. It begins with a grant and ends once; a block that names no lease
of this book belongs to nobody. The book holds at most as many leases as there are attempts with room in the pool.

Never: awaits, reads a clock, draws a nonce, or touches memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from kvlease.handoff.messages import Commit, Grant, LeaseId


@dataclass(frozen=True, slots=True)
class Lease:
    """One lease: its grant, what it must deliver, and which positions are verified (a bit each)."""

    grant: Grant
    sequence_id: int
    num_tokens: int
    num_blocks: int
    verified: int = 0

    @property
    def num_verified(self) -> int:
        """How many blocks are verified."""
        return self.verified.bit_count()

    @property
    def is_whole(self) -> bool:
        """Whether positions 0 to n - 1 are all verified."""
        return self.verified == (1 << self.num_blocks) - 1

    def has(self, position: int) -> bool:
        """Whether the block at `position` is verified."""
        return bool(self.verified >> position & 1)

    def disagreement(self, commit: Commit) -> str | None:
        """What the manifest gets wrong, or None."""
        if commit.num_blocks != self.num_blocks:
            return f"the manifest has {commit.num_blocks} blocks, the lease is for {self.num_blocks}"
        if commit.num_tokens != self.num_tokens:
            return f"the manifest has {commit.num_tokens} tokens, the prompt {self.num_tokens}"
        return None


class LeaseBook:
    """The living leases, by id."""

    __slots__ = ("_leases",)

    def __init__(self) -> None:
        """An empty book."""
        self._leases: dict[LeaseId, Lease] = {}

    def __len__(self) -> int:
        """How many leases live."""
        return len(self._leases)

    def __iter__(self) -> Iterator[Lease]:
        """The living leases."""
        return iter(tuple(self._leases.values()))

    def open(self, lease: Lease) -> None:
        """Enter a new lease; its id must be new."""
        assert lease.grant.lease_id not in self._leases, "lease ids are drawn at random and used once"
        self._leases[lease.grant.lease_id] = lease

    def find(self, lease_id: bytes) -> Lease | None:
        """The living lease with this id."""
        return self._leases.get(LeaseId(lease_id))

    def verify(self, lease_id: LeaseId, position: int) -> Lease:
        """Note that the block at `position` was verified; exactly once per position."""
        lease = self._leases[lease_id]
        assert 0 <= position < lease.num_blocks, "landing refuses strangers first"
        assert not lease.has(position), "landing refuses doubles first"
        self._leases[lease_id] = lease = replace(lease, verified=lease.verified | 1 << position)
        return lease

    def end(self, lease_id: LeaseId) -> Lease:
        """End a living lease: from now on its blocks are strangers."""
        return self._leases.pop(lease_id)

    def copy(self) -> LeaseBook:
        """An equal book of its own."""
        twin = LeaseBook()
        twin._leases = dict(self._leases)
        return twin

    def key(self) -> tuple[Lease, ...]:
        """A hashable picture of the book."""
        return tuple(sorted(self._leases.values(), key=lambda lease: lease.grant.lease_id))

    def __eq__(self, other: object) -> bool:
        """Equal when they hold the same leases."""
        return isinstance(other, LeaseBook) and self._leases == other._leases

    __hash__ = None  # type: ignore[assignment]  # mutable; hash `key()`
