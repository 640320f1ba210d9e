"""What one attempt holds on decode: room for the text, and the lease under which the prompt's blocks land in it.

Never: gives the room back before the lease, so no block can land in room that is being freed; or waits for anybody.
"""

from __future__ import annotations

from decode_server.landing import Berth, Dock, Inbox
from kvlease.handoff.lease_book import Lease
from kvlease.handoff.messages import Proposal
from kvlease.kvcache.landing import Expectation
from kvlease.kvcache.memory import KVMemory, Room
from kvlease.kvcache.seal import chain_hashes
from kvlease.kvcache.sizing import blocks_for


class AttemptHolding:
    """Nothing at first; then room; then room and a lease; then nothing again, once."""

    def __init__(self, proposal: Proposal, kv: KVMemory, dock: Dock) -> None:
        """Nothing is held."""
        self._proposal, self._kv, self._dock = proposal, kv, dock
        self.room: Room | None = None
        self.lease: Lease | None = None

    @property
    def num_blocks(self) -> int:
        """The room that the attempt needs: for the prompt and all that may be generated."""
        return blocks_for(len(self._proposal.prompt_token_ids) + self._proposal.max_tokens, self._kv.block_size)

    def take(self, room: Room) -> None:
        """The room is here, pinned for `scrub`; `scrubbed` must follow."""
        self.room = room
        self._kv.pin((room,))

    def scrub(self, room: Room) -> None:
        """Zero what is written slot by slot; the blocks before are wholly overwritten by what lands. For a thread."""
        self._kv.scrub(room, len(self._proposal.prompt_token_ids) // self._kv.block_size)

    def scrubbed(self, room: Room) -> None:
        """The thread is done with the room."""
        self._kv.unpin((room,))

    def open(self, lease: Lease, inbox: Inbox) -> None:
        """From now on the prompt's blocks may land; `inbox` hears of each."""
        assert self.room is not None, "the lease is opened for the room that was reserved"
        proposal, block_size = self._proposal, self._kv.block_size
        expectation = Expectation(
            lease.grant.lease_id,
            lease.grant.nonce,
            proposal.fingerprint,
            chain_hashes(proposal.prompt_token_ids, block_size),
            lease.num_tokens,
            block_size,
        )
        self._dock.open(lease, Berth(self.room, expectation, inbox))
        self.lease = lease

    def give_back(self, *, keep_room: bool) -> None:
        """The lease first: no block can land any more; then the room, at once, unless it is the caller's now."""
        if self.lease is not None:
            self._dock.end(self.lease.grant.lease_id)
        if self.room is not None and not keep_room:
            self._kv.free(self.room)
