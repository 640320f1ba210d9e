"""One attempt as prefill sees it: a value, the events that change it, and the actions that follow.

`prefill_step` is the whole behaviour. A prompt of several chunks asks for its grant when its first chunk starts, so that the transfer
overlaps the computation; a prompt of one chunk asks when its first token is known, so that a text which ends there costs no grant.

Never: acts; reads a clock; lets an attempt that has ended change again; counts a token as sendable that was not computed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlease.handoff.errors import IllegalMove
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    AttemptDown,
    Commit,
    Complete,
    Epoch,
    FinishReason,
    Grant,
    Proposal,
    Ready,
    Receipt,
    Rejected,
    Verdict,
)
from kvlease.handoff.tables import PrefillEvent, PrefillState, prefill_is_over, prefill_move
from kvlease.handoff.verdicts import aborted
from kvlease.sampling.tokens import DrawnToken, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict was made."""

    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Started:
    """The prompt's blocks are held and its first chunk is about to run."""

    in_one_chunk: bool


@dataclass(frozen=True, slots=True)
class ChunkComputed:
    """The forward pass has filled the slots up to `num_tokens`; the last chunk also drew the first token."""

    num_tokens: int
    first_token_id: int | None
    logprobs: TokenLogprobs | None = None
    further: tuple[DrawnToken, ...] = ()


@dataclass(frozen=True, slots=True)
class BlockSent:
    """The next sealed block, in order, is in the transport's hands; its engine blocks are not needed for it any more."""


@dataclass(frozen=True, slots=True)
class EndedHere:
    """Something outside ends the attempt: the stream's end, the deadline, a stall, a failure of the engine."""

    cause: Aborted


PrefillHappening = Judged | Started | ChunkComputed | BlockSent | Grant | Receipt | EndedHere


@dataclass(frozen=True, slots=True)
class SendDown:
    """Send a message to decode."""

    message: AttemptDown


@dataclass(frozen=True, slots=True)
class Enqueue:
    """Give the attempt its place in the queue."""


@dataclass(frozen=True, slots=True)
class Depart:
    """Seal and send blocks under this grant as they become sendable."""

    grant: Grant


@dataclass(frozen=True, slots=True)
class Free:
    """The engine blocks are not needed any more."""


@dataclass(frozen=True, slots=True)
class Over:
    """The attempt has ended on this side; the stream is to be closed."""


PrefillAction = SendDown | Enqueue | Depart | Free | Over


@dataclass(frozen=True, slots=True)
class PrefillAttempt:
    """An attempt at a prompt of `num_tokens` tokens, to be sent in sealed blocks of `wire_block_size` tokens."""

    num_tokens: int
    wire_block_size: int
    max_tokens: int
    end_token_ids: frozenset[int]
    epoch: Epoch
    state: PrefillState = PrefillState.RECEIVED
    num_computed: int = 0
    num_sent: int = 0
    first_token_id: int | None = None
    logprobs: TokenLogprobs | None = None
    further: tuple[DrawnToken, ...] = ()  # the first tokens of the other choices
    grant: Grant | None = None

    @classmethod
    def of(cls, proposal: Proposal, wire_block_size: int) -> PrefillAttempt:
        """The attempt that a proposal begins."""
        num_tokens = len(proposal.prompt_token_ids)
        return cls(num_tokens, wire_block_size, proposal.max_tokens, proposal.end_token_ids, proposal.epoch)

    @property
    def num_blocks(self) -> int:
        """Sealed blocks of the whole prompt."""
        return -(-self.num_tokens // self.wire_block_size)

    @property
    def num_sendable(self) -> int:
        """Sealed blocks whose every token is computed."""
        if self.num_computed == self.num_tokens:
            return self.num_blocks
        return self.num_computed // self.wire_block_size

    @property
    def may_send(self) -> bool:
        """Whether a block can be sealed and sent now."""
        return self.state is PrefillState.SENDING and self.num_sent < self.num_sendable

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
        return prefill_is_over(self.state)


Step = tuple[PrefillAttempt, tuple[PrefillAction, ...]]


def prefill_step(attempt: PrefillAttempt, happening: PrefillHappening) -> Step:
    """What `happening` makes of the attempt, and what is to be done. Events after the end change nothing."""
    if attempt.is_over:
        return attempt, ()
    try:
        return _step(attempt, happening)
    except IllegalMove as error:
        return _end(attempt, aborted(AbortReason.PROTOCOL_ERROR, str(error)))


def _step(attempt: PrefillAttempt, happening: PrefillHappening) -> Step:  # noqa: PLR0911 - one return per kind of event
    match happening:
        case Judged(verdict):
            return _judged(attempt, verdict)
        case Started(in_one_chunk):
            started = _moved(attempt, PrefillEvent.START)
            return (started, ()) if in_one_chunk or attempt.max_tokens == 1 else _offer(started)
        case ChunkComputed():
            return _computed(attempt, happening)
        case Grant():
            return _granted(attempt, happening)
        case BlockSent():
            assert attempt.may_send, "only computed blocks are sent, in order"
            sent = replace(_moved(attempt, PrefillEvent.BLOCK), num_sent=attempt.num_sent + 1)
            return _commit_if_all_sent(sent)
        case Receipt():
            return _moved(attempt, PrefillEvent.RECEIPT), (Over(),)
        case EndedHere(cause):
            return _end(attempt, cause)


def _moved(attempt: PrefillAttempt, event: PrefillEvent) -> PrefillAttempt:
    return replace(attempt, state=prefill_move(attempt.state, event))


def _end(attempt: PrefillAttempt, cause: Aborted) -> Step:
    # The blocks of a prompt that is sent were freed with its manifest.
    held = () if attempt.state is PrefillState.SENT else (Free(),)
    return _moved(attempt, PrefillEvent.END), (SendDown(cause), *held, Over())


def _judged(attempt: PrefillAttempt, verdict: Verdict) -> Step:
    if isinstance(verdict, Rejected):
        return _moved(attempt, PrefillEvent.REJECT), (SendDown(verdict), Over())
    return _moved(attempt, PrefillEvent.ADMIT), (SendDown(verdict), Enqueue())


def _offer(attempt: PrefillAttempt) -> Step:
    return _moved(attempt, PrefillEvent.OFFER), (SendDown(Ready()),)


def _computed(attempt: PrefillAttempt, chunk: ChunkComputed) -> Step:
    assert attempt.num_computed < chunk.num_tokens <= attempt.num_tokens, "chunks are computed in order, once"
    assert (chunk.first_token_id is not None) == (chunk.num_tokens == attempt.num_tokens), (
        "the last chunk draws the token"
    )
    moved = _moved(attempt, PrefillEvent.CHUNK)
    computed = replace(
        moved,
        num_computed=chunk.num_tokens,
        first_token_id=chunk.first_token_id,
        logprobs=chunk.logprobs,
        further=chunk.further,
    )
    if chunk.first_token_id is None:
        return computed, ()
    reason = _end_at_first_tokens(computed, chunk.first_token_id)
    if reason is not None:
        complete = Complete(chunk.first_token_id, reason, chunk.logprobs, chunk.further)
        return _moved(computed, PrefillEvent.COMPLETE), (SendDown(complete), Free(), Over())
    return _offer(computed) if computed.state is PrefillState.COMPUTING else (computed, ())


def _end_at_first_tokens(attempt: PrefillAttempt, token_id: int) -> FinishReason | None:
    """The first choice's reason, if the first tokens end all choices."""
    has_ended = token_id in attempt.end_token_ids
    if attempt.max_tokens == 1:
        return FinishReason.STOP if has_ended else FinishReason.LENGTH
    all_ended = has_ended and all(drawn.token_id in attempt.end_token_ids for drawn in attempt.further)
    return FinishReason.STOP if all_ended else None


def _granted(attempt: PrefillAttempt, grant: Grant) -> Step:
    if grant.epoch != attempt.epoch:
        message = f"the grant is for epoch {grant.epoch}, the attempt for {attempt.epoch}"
        return _end(attempt, aborted(AbortReason.PROTOCOL_ERROR, message))
    return replace(_moved(attempt, PrefillEvent.GRANT), grant=grant), (Depart(grant),)


def _commit_if_all_sent(attempt: PrefillAttempt) -> Step:
    if attempt.num_sent < attempt.num_blocks:
        return attempt, ()
    assert attempt.first_token_id is not None, "the last block is sendable only when the last chunk is computed"
    first = attempt.first_token_id, attempt.logprobs, attempt.further
    commit = Commit(attempt.num_sent, attempt.num_tokens, *first)
    return _moved(attempt, PrefillEvent.COMMIT), (Free(), SendDown(commit))
