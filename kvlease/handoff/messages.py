"""What crosses between gateway, decode and prefill, as plain values.

Every value checks itself when it is made, so nothing half-valid exists behind an edge. Protobuf stops at `wire`.

Never: does I/O, reads a clock, draws a random number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from typing import NewType

from kvlease.handoff.limits import Limits
from kvlease.sampling.params import SamplingParams
from kvlease.sampling.tokens import DrawnToken, TokenLogprobs

RequestId = NewType("RequestId", str)
TenantId = NewType("TenantId", str)
LeaseId = NewType("LeaseId", bytes)
Nonce = NewType("Nonce", bytes)
Incarnation = NewType("Incarnation", bytes)
Epoch = NewType("Epoch", int)

IDENTITY_BYTES = 16
_LIMITS = Limits()
DEFAULT_TENANT = TenantId("default")


class FinishReason(StrEnum):
    """Why a text ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


def _check_error_status(http_status: int) -> None:
    if not 400 <= http_status < 600:
        raise ValueError(f"an error's HTTP status is 400 to 599, got {http_status}")


def _check_wishes(asked: GenerationRequest | Proposal) -> None:
    if asked.sampling.min_tokens > asked.max_tokens:
        raise ValueError(f"min_tokens {asked.sampling.min_tokens} is more than max_tokens {asked.max_tokens}")
    if len(asked.end_token_ids) > _LIMITS.max_end_tokens:
        raise ValueError(f"{len(asked.end_token_ids)} end tokens, at most {_LIMITS.max_end_tokens}")
    if not 1 <= asked.num_choices <= _LIMITS.max_choices:
        raise ValueError(f"{asked.num_choices} choices, 1 to {_LIMITS.max_choices} can be asked for")


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One text to be generated, or several of one prompt (`num_choices`), as the gateway hands it to decode.

    `remaining_s` is the time left until the deadline at the moment of sending; `prefill_candidates` are addresses, best first.
    """

    request_id: RequestId
    tenant: TenantId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    end_token_ids: frozenset[int]
    remaining_s: float
    prefill_candidates: tuple[str, ...]
    num_choices: int = 1

    def __post_init__(self) -> None:
        """Refuse an empty prompt and a request for nothing."""
        if not self.request_id or not self.tenant:
            raise ValueError("a request needs an id and a tenant")
        if not self.prompt_token_ids:
            raise ValueError("the prompt has no tokens")
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, got {self.max_tokens}")
        if not (math.isfinite(self.remaining_s) and self.remaining_s > 0):
            raise ValueError(f"the deadline has passed ({self.remaining_s} s left)")
        _check_wishes(self)


@dataclass(frozen=True, slots=True)
class TokensGenerated:
    """New tokens of one choice, in order, and what is told of each, if that was asked for."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] = ()
    choice: int = 0

    def __post_init__(self) -> None:
        """Refuse to tell of some tokens only."""
        if self.logprobs and len(self.logprobs) != len(self.token_ids):
            raise ValueError(f"{len(self.token_ids)} tokens, but {len(self.logprobs)} of them told of")

    @classmethod
    def of(cls, drawn: DrawnToken, choice: int) -> TokensGenerated:
        """One token."""
        return cls((drawn.token_id,), () if drawn.logprobs is None else (drawn.logprobs,), choice)


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """One text of several is complete; the request is not, until `Finished`. Counts as there."""

    choice: int
    reason: FinishReason
    num_generated_tokens: int


@dataclass(frozen=True, slots=True)
class Finished:
    """All texts are complete; `reason` is the first one's. End tokens that were drawn are counted but were not among the tokens."""

    reason: FinishReason
    num_prompt_tokens: int
    num_generated_tokens: int


class RejectReason(StrEnum):
    """Why a request was refused before anything was granted."""

    PROMPT_TOO_LONG = "prompt_too_long"  # for this side's pool or context, however idle
    OUTPUT_TOO_LONG = "output_too_long"
    INVALID_REQUEST = "invalid_request"
    QUEUE_FULL = "queue_full"
    NO_PREFILL = "no_prefill"  # no candidate is paired and alive
    MISMATCH = "mismatch"  # versions, models, layouts, pools that cannot work together
    STALE_PAIR = "stale_pair"  # proposed under an epoch or incarnation that has ended
    DEADLINE = "deadline"
    DRAINING = "draining"


@dataclass(frozen=True, slots=True)
class Rejected:
    """A verdict: no KV byte was computed, sent or held. Made once, by the side that knows, and carried unchanged to the client."""

    reason: RejectReason
    message: str
    code: str
    http_status: int
    param: str = ""

    def __post_init__(self) -> None:
        """Refuse a status that could look like a success."""
        _check_error_status(self.http_status)


class AbortReason(StrEnum):
    """Why something that had been admitted ended without its text."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    PEER_LOST = "peer_lost"
    PEER_STALLED = "peer_stalled"
    CHANNEL_BROKEN = "channel_broken"
    SEAL_REFUSED = "seal_refused"  # a block failed its check; the message names which
    MANIFEST_MISMATCH = "manifest_mismatch"
    PROTOCOL_ERROR = "protocol_error"
    ENGINE_FAILED = "engine_failed"
    SHUTDOWN = "shutdown"


@dataclass(frozen=True, slots=True)
class Aborted:
    """The end of an admitted attempt or request. `retryable`: another candidate may do better, as long as no token reached the client."""

    reason: AbortReason
    message: str
    code: str
    http_status: int
    retryable: bool

    def __post_init__(self) -> None:
        """Refuse a status that could look like a success."""
        _check_error_status(self.http_status)


GenerationEvent = TokensGenerated | ChoiceFinished | Finished | Rejected | Aborted


@dataclass(frozen=True, slots=True)
class Proposal:
    """Decode asks prefill for one attempt at one request."""

    request_id: RequestId
    attempt: int
    tenant: TenantId
    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    end_token_ids: frozenset[int]
    remaining_s: float
    decode_incarnation: Incarnation
    epoch: Epoch
    fingerprint: bytes
    num_choices: int = 1

    def __post_init__(self) -> None:
        """Refuse an empty prompt and a request for nothing."""
        if not self.prompt_token_ids or self.max_tokens < 1:
            raise ValueError("a proposal needs prompt tokens and max_tokens of at least 1")
        _check_wishes(self)


@dataclass(frozen=True, slots=True)
class Admitted:
    """The other verdict: the proposal has a place in prefill's queue, behind `num_queued` others."""

    num_queued: int


Verdict = Admitted | Rejected


@dataclass(frozen=True, slots=True)
class Ready:
    """Prefill wants to send: it asks for the grant."""


@dataclass(frozen=True, slots=True)
class Grant:
    """The lease: the right to deliver this attempt's blocks over the connection of this epoch."""

    lease_id: LeaseId
    nonce: Nonce
    epoch: Epoch

    def __post_init__(self) -> None:
        """Refuse identities of the wrong length."""
        if len(self.lease_id) != IDENTITY_BYTES or len(self.nonce) != IDENTITY_BYTES:
            raise ValueError("lease id and nonce are 16 bytes each")


@dataclass(frozen=True, slots=True)
class Commit:
    """The manifest: every block of the prompt was sent, and this is the first token."""

    num_blocks: int
    num_tokens: int
    first_token_id: int
    logprobs: TokenLogprobs | None = None  # of the first token
    further: tuple[DrawnToken, ...] = ()  # the first tokens of the other choices

    @property
    def first_tokens(self) -> tuple[DrawnToken, ...]:
        """Of all choices."""
        return (DrawnToken(self.first_token_id, self.logprobs), *self.further)


@dataclass(frozen=True, slots=True)
class Complete:
    """The first token of every choice ended its text or was all that was asked for: nothing to transfer. `reason`: of the first choice."""

    first_token_id: int
    reason: FinishReason
    logprobs: TokenLogprobs | None = None
    further: tuple[DrawnToken, ...] = ()

    @property
    def first_tokens(self) -> tuple[DrawnToken, ...]:
        """Of all choices."""
        return (DrawnToken(self.first_token_id, self.logprobs), *self.further)


@dataclass(frozen=True, slots=True)
class Receipt:
    """Decode has verified and committed the handoff. Bookkeeping only."""

    num_blocks: int


AttemptUp = Proposal | Grant | Receipt
AttemptDown = Admitted | Rejected | Ready | Commit | Complete | Aborted
