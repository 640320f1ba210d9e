"""One admitted prompt on prefill: performs what `prefill_step` says, and hears everything that happens to it.

Never: decides; or keeps a block after the step that freed it.
"""

from __future__ import annotations

import asyncio
from typing import Protocol

from kvlease.engine.batch import Draw
from kvlease.engine.past import PastTokens, PromptTokens
from kvlease.handoff.messages import AttemptDown, Proposal
from kvlease.handoff.prefill_attempt import (
    Depart,
    Enqueue,
    Free,
    Over,
    PrefillAction,
    PrefillAttempt,
    PrefillHappening,
    SendDown,
    prefill_step,
)
from kvlease.kvcache.departure import DepartureLease
from kvlease.kvcache.ledger import ComputedBlocks
from kvlease.kvcache.memory import KVMemory, Room
from kvlease.kvcache.seal import chain_hashes


class Line(Protocol):
    """A queue that prompts enter and leave."""

    def enter(self, prompt: Prompt) -> None:
        """Take a place."""

    def leave(self, prompt: Prompt) -> None:
        """Give it up. Harmless without one."""


class Prompt:
    """A proposal with its attempt, its room while it has one, and its way out of here."""

    def __init__(self, proposal: Proposal, wire_block_size: int, kv: KVMemory, queue: Line, departures: Line) -> None:
        """Received; not judged yet."""
        self.proposal = proposal
        self.attempt = PrefillAttempt.of(proposal, wire_block_size)
        self.room: Room | None = None
        self.computed: ComputedBlocks | None = None
        self.lease: DepartureLease | None = None
        self.outbox: asyncio.Queue[AttemptDown | None] = asyncio.Queue()  # None: nothing follows
        self._kv, self._queue, self._departures = kv, queue, departures

    def happen(self, happening: PrefillHappening) -> PrefillAttempt:
        """Take the news and do what follows, at once. Returns the attempt as it is now."""
        self.attempt, actions = prefill_step(self.attempt, happening)
        for action in actions:
            self._perform(action)
        if self.attempt.may_send:
            self._departures.enter(self)
        return self.attempt

    @property
    def draws(self) -> tuple[Draw, ...]:
        """How the first token of each choice is drawn."""
        proposal, sampling = self.proposal, self.proposal.sampling
        past = PastTokens(PromptTokens(proposal.prompt_token_ids)) if sampling.penalises else None
        banned = sampling.banned(proposal.end_token_ids, 0)
        return tuple(Draw(sampling.for_choice(index), banned, past) for index in range(proposal.num_choices))

    def _perform(self, action: PrefillAction) -> None:
        match action:
            case SendDown(message):
                self.outbox.put_nowait(message)
            case Enqueue():
                self._queue.enter(self)
            case Depart(grant):
                chains = chain_hashes(self.proposal.prompt_token_ids, self.attempt.wire_block_size)
                self.lease = DepartureLease(
                    grant.lease_id, grant.nonce, self.proposal.fingerprint, chains, self.attempt.wire_block_size
                )
            case Free():
                self._free()
            case Over():
                self.outbox.put_nowait(None)

    def _free(self) -> None:
        self._queue.leave(self)
        self._departures.leave(self)
        self.computed = None
        if self.room is not None:
            self._kv.free(self.room)
            self.room = None
