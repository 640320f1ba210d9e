"""Verdicts and ends: who is refused, with which words, code and HTTP status.

`judge_prompt` is prefill's verdict, `judge_request` decode's door; both look at plain facts, so the side that knows decides once.

Never: weakens a verdict on the way; `Rejected` and `Aborted` travel as they were made.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Admitted,
    Epoch,
    GenerationRequest,
    Proposal,
    Rejected,
    RejectReason,
    Verdict,
)
from kvlease.kvcache.sizing import choice_blocks


@dataclass(frozen=True, slots=True)
class Treatment:
    """What becomes of a reason: OpenAI's error code, the HTTP status, and whether another candidate may be asked."""

    code: str
    http_status: int
    retryable: bool


REJECTIONS: Final[Mapping[RejectReason, Treatment]] = {
    RejectReason.PROMPT_TOO_LONG: Treatment("context_length_exceeded", 400, retryable=False),
    RejectReason.OUTPUT_TOO_LONG: Treatment("context_length_exceeded", 400, retryable=False),
    RejectReason.INVALID_REQUEST: Treatment("invalid_request", 400, retryable=False),
    RejectReason.QUEUE_FULL: Treatment("overloaded", 503, retryable=True),
    RejectReason.NO_PREFILL: Treatment("no_prefill_server", 503, retryable=True),
    RejectReason.MISMATCH: Treatment("incompatible_servers", 503, retryable=True),
    RejectReason.STALE_PAIR: Treatment("stale_pair", 503, retryable=True),
    RejectReason.DEADLINE: Treatment("deadline_exceeded", 504, retryable=False),
    RejectReason.DRAINING: Treatment("draining", 503, retryable=True),
}

ABORTS: Final[Mapping[AbortReason, Treatment]] = {
    AbortReason.CANCELLED: Treatment("cancelled", 499, retryable=False),
    AbortReason.DEADLINE: Treatment("deadline_exceeded", 504, retryable=False),
    AbortReason.PEER_LOST: Treatment("peer_lost", 503, retryable=True),
    AbortReason.PEER_STALLED: Treatment("peer_stalled", 503, retryable=True),
    AbortReason.CHANNEL_BROKEN: Treatment("channel_broken", 503, retryable=True),
    AbortReason.SEAL_REFUSED: Treatment("seal_refused", 502, retryable=True),
    AbortReason.MANIFEST_MISMATCH: Treatment("manifest_mismatch", 502, retryable=True),
    AbortReason.PROTOCOL_ERROR: Treatment("protocol_error", 502, retryable=True),
    AbortReason.ENGINE_FAILED: Treatment("engine_failed", 500, retryable=False),
    AbortReason.SHUTDOWN: Treatment("shutting_down", 503, retryable=True),
}


def rejected(reason: RejectReason, message: str, param: str = "") -> Rejected:
    """The verdict `reason`, with the code and status it always has."""
    treatment = REJECTIONS[reason]
    return Rejected(reason, message, treatment.code, treatment.http_status, param)


def aborted(reason: AbortReason, message: str) -> Aborted:
    """The end `reason`, with the code, status and retry rule it always has."""
    treatment = ABORTS[reason]
    return Aborted(reason, message, treatment.code, treatment.http_status, treatment.retryable)


def may_ask_another(verdict: Rejected) -> bool:
    """Whether another candidate may judge differently: load and pairing differ between servers, a request's size does not."""
    return REJECTIONS[verdict.reason].retryable


@dataclass(frozen=True, slots=True)
class PrefillFacts:
    """What prefill's verdict rests on, at one moment. Tokens where not said otherwise."""

    pool_tokens: int
    max_model_len: int
    vocab_size: int
    num_queued: int
    max_queue: int
    draining: bool
    epoch: Epoch | None  # of the living pair with the proposer; None: there is none
    fingerprint: bytes


@dataclass(frozen=True, slots=True)
class DecodeFacts:
    """What decode's door rests on, at one moment. Tokens where not said otherwise."""

    pool_tokens: int
    max_model_len: int
    vocab_size: int
    num_queued: int
    max_queue: int
    draining: bool
    block_size: int = 1  # several texts of one prompt share whole blocks only


def judge_prompt(proposal: Proposal, facts: PrefillFacts) -> Verdict:
    """Prefill's verdict on a proposal: could it ever run here, and is there a place in the queue?"""
    num_tokens = len(proposal.prompt_token_ids)
    limit = min(facts.pool_tokens, facts.max_model_len)
    if facts.epoch is None or facts.epoch != proposal.epoch:
        return rejected(RejectReason.STALE_PAIR, f"no living pair has epoch {proposal.epoch}")
    if proposal.fingerprint != facts.fingerprint:
        return rejected(RejectReason.MISMATCH, "the proposal is for another model or block layout")
    if num_tokens > limit:
        message = f"the prompt has {num_tokens} tokens, but the prefill server holds at most {limit}"
        return rejected(RejectReason.PROMPT_TOO_LONG, message, "prompt")
    unknown = _judge_tokens(proposal, facts.vocab_size)
    if unknown is not None:
        return unknown
    if proposal.remaining_s <= 0:
        return rejected(RejectReason.DEADLINE, "the deadline had passed when the proposal arrived")
    return _judge_load(facts) or Admitted(facts.num_queued)


def judge_request(request: GenerationRequest, facts: DecodeFacts) -> Rejected | None:
    """Decode's door: could prompt + max_tokens ever fit here, and is the queue below its bound? None: come in."""
    num_tokens = len(request.prompt_token_ids)
    limit = min(facts.pool_tokens, facts.max_model_len)
    if num_tokens >= limit:
        message = f"the prompt has {num_tokens} tokens, but at most {limit} fit, with at least one to generate"
        return rejected(RejectReason.PROMPT_TOO_LONG, message, "prompt")
    if num_tokens + request.max_tokens > limit:
        message = f"{num_tokens} prompt tokens and max_tokens {request.max_tokens} exceed the {limit} that fit"
        return rejected(RejectReason.OUTPUT_TOO_LONG, message, "max_tokens")
    return _judge_choices(request, facts) or _judge_tokens(request, facts.vocab_size) or _judge_load(facts)


def _judge_choices(request: GenerationRequest, facts: DecodeFacts) -> Rejected | None:
    sizes = choice_blocks(len(request.prompt_token_ids), request.max_tokens, request.num_choices, facts.block_size)
    num_tokens = sum(sizes) * facts.block_size
    if request.num_choices == 1 or num_tokens <= facts.pool_tokens:
        return None
    message = f"{request.num_choices} choices need {num_tokens} tokens of KV memory, the decode server has {facts.pool_tokens}"
    return rejected(RejectReason.OUTPUT_TOO_LONG, message, "n")


def _judge_tokens(asked: GenerationRequest | Proposal, vocab_size: int) -> Rejected | None:
    for param, token_ids in (("prompt", asked.prompt_token_ids), ("logit_bias", asked.sampling.token_ids)):
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocab_size):
            return rejected(RejectReason.INVALID_REQUEST, f"token ids must be below {vocab_size}", param)
    return None


def _judge_load(facts: PrefillFacts | DecodeFacts) -> Rejected | None:
    if facts.draining:
        return rejected(RejectReason.DRAINING, "the server is shutting down")
    if facts.num_queued >= facts.max_queue:
        return rejected(RejectReason.QUEUE_FULL, f"{facts.num_queued} requests wait already")
    return None
