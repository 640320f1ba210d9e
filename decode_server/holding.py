"""What one attempt holds on decode: room for its texts, and the lease under which the prompt's blocks land in it.

Never: gives a room back before the lease, so no block can land in room that is being freed; or waits for anybody.
"""

from __future__ import annotations

from decode_server.landing import Berth, Dock, Inbox
from decode_server.memory import Rooms
from kvlease.handoff.lease_book import Lease
from kvlease.handoff.messages import Proposal
from kvlease.kvcache.landing import Expectation
from kvlease.kvcache.memory import KVMemory
from kvlease.kvcache.seal import chain_hashes
from kvlease.kvcache.sizing import choice_blocks


class AttemptHolding:
    """Nothing at first; then rooms, the first for the prompt; then these and a lease; then nothing again, once."""

    def __init__(self, proposal: Proposal, kv: KVMemory, dock: Dock) -> None:
        """Nothing is held."""
        self._proposal, self._kv, self._dock = proposal, kv, dock
        self.rooms: Rooms = ()
        self.lease: Lease | None = None

    @property
    def sizes(self) -> tuple[int, ...]:
        """The rooms that the attempt needs (blocks), one a choice: for the prompt and all that may be generated."""
        proposal, block_size = self._proposal, self._kv.block_size
        return choice_blocks(len(proposal.prompt_token_ids), proposal.max_tokens, proposal.num_choices, block_size)

    def take(self, rooms: Rooms) -> None:
        """The rooms are here, the prompt's pinned for `scrub`; `scrubbed` must follow."""
        self.rooms = rooms
        self._kv.pin(rooms[:1])

    def scrub(self, rooms: Rooms) -> None:
        """Zero what of the prompt's room is written slot by slot; its blocks before are wholly overwritten by what lands. For a thread."""
        self._kv.scrub(rooms[0], len(self._proposal.prompt_token_ids) // self._kv.block_size)

    def scrubbed(self, rooms: Rooms) -> None:
        """The thread is done with the prompt's room."""
        self._kv.unpin(rooms[:1])

    def open(self, lease: Lease, inbox: Inbox) -> None:
        """From now on the prompt's blocks may land; `inbox` hears of each."""
        assert self.rooms, "the lease is opened for the room that was reserved"
        proposal, block_size = self._proposal, self._kv.block_size
        expectation = Expectation(
            lease.grant.lease_id,
            lease.grant.nonce,
            proposal.fingerprint,
            chain_hashes(proposal.prompt_token_ids, block_size),
            lease.num_tokens,
            block_size,
        )
        self._dock.open(lease, Berth(self.rooms[0], expectation, inbox))
        self.lease = lease

    def give_back(self, *, keep_rooms: bool) -> None:
        """The lease first: no block can land any more; then all rooms, at once, unless they are the caller's now."""
        if self.lease is not None:
            self._dock.end(self.lease.grant.lease_id)
        for room in () if keep_rooms else self.rooms:
            self._kv.free(room)
