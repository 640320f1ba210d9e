"""One attempt as decode sees it: a value, the events that change it, and the actions that follow.

`decode_step` is the whole behaviour. The shell performs the actions and feeds back what happened.

Never: acts; reads a clock; lets an attempt that has ended change again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from kvlease.handoff.errors import IllegalMove
from kvlease.handoff.lease_book import Lease
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Admitted,
    AttemptDown,
    AttemptUp,
    Commit,
    Complete,
    FinishReason,
    Grant,
    Ready,
    Receipt,
    Rejected,
)
from kvlease.handoff.tables import DecodeEvent, DecodeState, decode_is_over, decode_move
from kvlease.handoff.verdicts import aborted
from kvlease.sampling.tokens import DrawnToken, TokenLogprobs


@dataclass(frozen=True, slots=True)
class RoomReserved:
    """Room for prompt + max_tokens is held, and the grant was drawn."""

    grant: Grant
    sequence_id: int


@dataclass(frozen=True, slots=True)
class BlockVerified:
    """A block landed under the lease and its copy was verified; `lease` is as the book has it now."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class BlockRefused:
    """A block that claimed the lease failed its check."""

    check: str
    message: str


@dataclass(frozen=True, slots=True)
class Ended:
    """Something outside ends the attempt: a cancel, the deadline, a stall, the pair's death."""

    cause: Aborted


DecodeHappening = AttemptDown | RoomReserved | BlockVerified | BlockRefused | Ended


@dataclass(frozen=True, slots=True)
class AskRoom:
    """Reserve room in the pool; answer with `RoomReserved`."""


@dataclass(frozen=True, slots=True)
class OpenLease:
    """Enter the lease in the pair's book, before the grant is sent."""

    lease: Lease


@dataclass(frozen=True, slots=True)
class SendUp:
    """Send a message to prefill."""

    message: AttemptUp


@dataclass(frozen=True, slots=True)
class Committed:
    """The prompt's blocks are all here and verified; generation starts with this token, and these for further choices."""

    first_token_id: int
    logprobs: TokenLogprobs | None = None
    further: tuple[DrawnToken, ...] = ()

    @property
    def first_tokens(self) -> tuple[DrawnToken, ...]:
        """Of all choices."""
        return (DrawnToken(self.first_token_id, self.logprobs), *self.further)


@dataclass(frozen=True, slots=True)
class FirstToken:
    """What decode knows itself of the first token: the vocabulary, how many tokens are wanted, and which ones end the text."""

    vocab_size: int
    max_tokens: int
    end_token_ids: frozenset[int]

    def disagreement(self, said: Commit | Complete) -> str | None:
        """What prefill gets wrong, or None."""
        token_id = said.first_token_id
        for drawn in said.first_tokens:
            if not 0 <= drawn.token_id < self.vocab_size:
                return f"the first token is {drawn.token_id}, the vocabulary has {self.vocab_size}"
        if isinstance(said, Commit):
            return None
        reason = self._reason_to_end(said)
        if said.reason is not reason:
            return (
                f"prefill ends the text at token {token_id} with {said.reason}, decode finds {reason or 'no reason to'}"
            )
        return None

    def _reason_to_end(self, complete: Complete) -> FinishReason | None:
        """The first choice's, if all choices end here."""
        ends = [drawn.token_id in self.end_token_ids for drawn in complete.first_tokens]
        if self.max_tokens == 1:
            return FinishReason.STOP if ends[0] else FinishReason.LENGTH
        return FinishReason.STOP if all(ends) else None


Outcome = Committed | Complete | Rejected | Aborted


@dataclass(frozen=True, slots=True)
class Conclude:
    """The attempt is over. What it holds is freed now, unless it is committed."""

    outcome: Outcome


DecodeAction = AskRoom | OpenLease | SendUp | Conclude


@dataclass(frozen=True, slots=True)
class DecodeAttempt:
    """An attempt at a prompt of `num_tokens` tokens in `num_blocks` sealed blocks."""

    num_tokens: int
    num_blocks: int
    state: DecodeState = DecodeState.PROPOSED
    lease: Lease | None = None
    commit: Commit | None = None
    num_choices: int = 1
    first_token: FirstToken | None = None  # None: no text follows, as when only the handoff itself is looked at

    @property
    def is_over(self) -> bool:
        """Whether it has concluded."""
        return decode_is_over(self.state)


Step = tuple[DecodeAttempt, tuple[DecodeAction, ...]]


def decode_step(attempt: DecodeAttempt, happening: DecodeHappening) -> Step:
    """What `happening` makes of the attempt, and what is to be done. Events after the end change nothing."""
    if attempt.is_over:
        return attempt, ()
    try:
        return _step(attempt, happening)
    except IllegalMove as error:
        return _end(attempt, aborted(AbortReason.PROTOCOL_ERROR, str(error)))


def _step(attempt: DecodeAttempt, happening: DecodeHappening) -> Step:  # noqa: PLR0911, C901 - one branch per kind of event
    match happening:
        case Admitted():
            return _moved(attempt, DecodeEvent.ADMITTED), ()
        case Rejected():
            return _moved(attempt, DecodeEvent.REJECTED), (Conclude(happening),)
        case Ready():
            return _moved(attempt, DecodeEvent.READY), (AskRoom(),)
        case RoomReserved():
            return _grant(attempt, happening)
        case BlockVerified(lease):
            return _close_if_whole(replace(_moved(attempt, DecodeEvent.BLOCK), lease=lease))
        case BlockRefused(check, message):
            return _end(attempt, aborted(AbortReason.SEAL_REFUSED, f"a block failed its {check} check: {message}"))
        case Commit():
            return _commit(attempt, happening)
        case Complete():
            return _complete(attempt, happening)
        case Aborted():
            return _end(attempt, happening)
        case Ended(cause):
            return _end(attempt, cause)


def _moved(attempt: DecodeAttempt, event: DecodeEvent) -> DecodeAttempt:
    return replace(attempt, state=decode_move(attempt.state, event))


def _end(attempt: DecodeAttempt, cause: Aborted) -> Step:
    return _moved(attempt, DecodeEvent.END), (Conclude(cause),)


def _grant(attempt: DecodeAttempt, room: RoomReserved) -> Step:
    lease = Lease(room.grant, room.sequence_id, attempt.num_tokens, attempt.num_blocks)
    granted = replace(_moved(attempt, DecodeEvent.ROOM), lease=lease)
    return granted, (OpenLease(lease), SendUp(room.grant))


def _commit(attempt: DecodeAttempt, commit: Commit) -> Step:
    closing = replace(_moved(attempt, DecodeEvent.COMMIT), commit=commit)
    assert closing.lease is not None, "a commit is legal only after the grant"
    wrong = closing.lease.disagreement(commit) or _wrong_tokens(attempt, commit)
    if wrong is not None:
        return _end(closing, aborted(AbortReason.MANIFEST_MISMATCH, wrong))
    return _close_if_whole(closing)


def _complete(attempt: DecodeAttempt, complete: Complete) -> Step:
    wrong = _wrong_tokens(attempt, complete)
    if wrong is not None:
        return _end(attempt, aborted(AbortReason.MANIFEST_MISMATCH, wrong))
    return _moved(attempt, DecodeEvent.COMPLETE), (Conclude(complete),)


def _wrong_tokens(attempt: DecodeAttempt, said: Commit | Complete) -> str | None:
    found = len(said.first_tokens)
    if found != attempt.num_choices:
        return f"{found} first tokens came for {attempt.num_choices} choices"
    return None if attempt.first_token is None else attempt.first_token.disagreement(said)


def _close_if_whole(attempt: DecodeAttempt) -> Step:
    assert attempt.lease is not None, "blocks land only after the grant"
    if attempt.commit is None or not attempt.lease.is_whole:
        return attempt, ()
    commit = attempt.commit
    committed = Committed(commit.first_token_id, commit.logprobs, commit.further)
    return _moved(attempt, DecodeEvent.WHOLE), (SendUp(Receipt(attempt.num_blocks)), Conclude(committed))
