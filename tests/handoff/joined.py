"""Both roles of one attempt, joined by an ordered wire in memory. Blocks travel on a wire of their own, as they do for real."""

from __future__ import annotations

from collections import deque

from kvlease.handoff.decode_attempt import (
    AskRoom,
    BlockVerified,
    Conclude,
    DecodeAction,
    DecodeAttempt,
    DecodeHappening,
    OpenLease,
    Outcome,
    RoomReserved,
    SendUp,
    decode_step,
)
from kvlease.handoff.lease_book import LeaseBook
from kvlease.handoff.messages import (
    AttemptDown,
    AttemptUp,
    Epoch,
    Grant,
    Incarnation,
    LeaseId,
    Nonce,
    Proposal,
    Receipt,
    RequestId,
    TenantId,
)
from kvlease.handoff.prefill_attempt import (
    BlockSent,
    Depart,
    Free,
    Over,
    PrefillAction,
    PrefillAttempt,
    PrefillHappening,
    SendDown,
    prefill_step,
)
from kvlease.sampling.params import SamplingParams

EPOCH = Epoch(7)
GRANT = Grant(LeaseId(b"l" * 16), Nonce(b"n" * 16), EPOCH)
BLOCK_SIZE = 4
END_TOKEN = 2


def proposal(
    num_tokens: int = 10, max_tokens: int = 5, sampling: SamplingParams | None = None, num_choices: int = 1
) -> Proposal:
    tokens = tuple(range(3, 3 + num_tokens))
    sampling, ends = sampling or SamplingParams(), frozenset({END_TOKEN})
    identity = (Incarnation(b"i" * 16), EPOCH, b"f" * 16)
    return Proposal(RequestId("r"), 0, TenantId("t"), tokens, max_tokens, sampling, ends, 5.0, *identity, num_choices)


class Joined:
    """One attempt on both sides. Nothing moves until a test says so."""

    def __init__(self, num_tokens: int = 10, max_tokens: int = 5) -> None:
        self.prefill = PrefillAttempt.of(proposal(num_tokens, max_tokens), BLOCK_SIZE)
        self.decode = DecodeAttempt(num_tokens, self.prefill.num_blocks)
        self.up: deque[AttemptUp] = deque()
        self.down: deque[AttemptDown] = deque()
        self.blocks: deque[int] = deque()
        self.book = LeaseBook()
        self.said: list[AttemptDown] = []
        self.outcomes: list[Outcome] = []
        self.num_frees = self.num_overs = 0

    def happen_at_prefill(self, happening: PrefillHappening) -> tuple[PrefillAction, ...]:
        self.prefill, actions = prefill_step(self.prefill, happening)
        for action in actions:
            if isinstance(action, SendDown):
                self.said.append(action.message)
                self.down.append(action.message)
            self.num_frees += isinstance(action, Free)
            self.num_overs += isinstance(action, Over)
            if isinstance(action, Depart):
                assert action.grant == GRANT
        return actions

    def happen_at_decode(self, happening: DecodeHappening) -> tuple[DecodeAction, ...]:
        self.decode, actions = decode_step(self.decode, happening)
        for action in actions:
            match action:
                case SendUp(message):
                    self.up.append(message)
                case OpenLease(lease):
                    self.book.open(lease)
                case Conclude(outcome):
                    self.outcomes.append(outcome)
                case AskRoom():
                    pass
        return actions

    def deliver_down(self) -> tuple[DecodeAction, ...]:
        return self.happen_at_decode(self.down.popleft())

    def send_block(self) -> None:
        self.blocks.append(self.prefill.num_sent)
        self.happen_at_prefill(BlockSent())

    def land_block(self) -> None:
        self.happen_at_decode(BlockVerified(self.book.verify(GRANT.lease_id, self.blocks.popleft())))

    def settle(self) -> None:
        """Deliver everything, grant room when it is asked for, and send whatever may be sent."""
        while self.down or self.up or self.blocks or self.prefill.may_send:
            if self.prefill.may_send:
                self.send_block()
            elif self.blocks and not self.decode.is_over:
                self.land_block()
            elif self.blocks:
                self.blocks.popleft()
            elif self.down:
                if AskRoom() in self.deliver_down():
                    self.happen_at_decode(RoomReserved(GRANT, 1))
            else:
                message = self.up.popleft()
                assert isinstance(message, Grant | Receipt), "the proposal began the attempt"
                self.happen_at_prefill(message)
