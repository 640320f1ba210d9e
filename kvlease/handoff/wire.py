"""The one converter between the handoff's values and protobuf.

Decoding a peer's message gives a value or raises `WireError`; nothing half-decoded leaves this module.

Never: lets a protobuf object past the gRPC edge.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Admitted,
    AttemptDown,
    AttemptUp,
    ChoiceFinished,
    Commit,
    Complete,
    Epoch,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Grant,
    Incarnation,
    LeaseId,
    Nonce,
    Proposal,
    Ready,
    Receipt,
    Rejected,
    RejectReason,
    RequestId,
    TenantId,
    TokensGenerated,
)
from kvlease.sampling.params import SamplingParams
from kvlease.sampling.tokens import DrawnToken, TokenLogprobs
from kvlease.v1 import kvlease_pb2 as pb

Decoded = TypeVar("Decoded")
_MAX_QUOTED_CHARS = 200


class WireError(ValueError):
    """A peer's message does not make sense; the text says which and why."""


def _checked(name: str, make: Callable[[], Decoded]) -> Decoded:
    try:
        return make()
    except ValueError as error:
        raise WireError(f"{name}: {_short(str(error))}") from error


def _short(text: str) -> str:
    """What is wrong may quote what the peer sent, and that may be long."""
    return text if len(text) <= _MAX_QUOTED_CHARS else text[:_MAX_QUOTED_CHARS] + "…"


def to_milliseconds(seconds: float) -> int:
    """Remaining time as it travels: rounded down, at least one millisecond while any is left."""
    return min(max(int(seconds * 1000), 1), 2**32 - 1) if seconds > 0 else 0


def encode_sampling(sampling: SamplingParams) -> pb.Sampling:
    """For both requests and proposals."""
    return pb.Sampling(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        seed=sampling.seed,
        min_tokens=sampling.min_tokens,
        min_p=sampling.min_p,
        repetition_penalty=sampling.repetition_penalty,
        presence_penalty=sampling.presence_penalty,
        frequency_penalty=sampling.frequency_penalty,
        logit_bias=[pb.Bias(token_id=token_id, value=value) for token_id, value in sampling.logit_bias],
        top_logprobs=sampling.top_logprobs,
    )


def _decode_sampling(message: pb.Sampling) -> SamplingParams:
    return SamplingParams(
        temperature=message.temperature,
        top_p=message.top_p,
        top_k=message.top_k,
        seed=message.seed,
        min_tokens=message.min_tokens,
        min_p=message.min_p,
        repetition_penalty=message.repetition_penalty or 1.0,
        presence_penalty=message.presence_penalty,
        frequency_penalty=message.frequency_penalty,
        logit_bias=tuple((bias.token_id, bias.value) for bias in message.logit_bias),
        top_logprobs=message.top_logprobs if message.HasField("top_logprobs") else None,
    )


def _encode_logprobs(told: TokenLogprobs) -> pb.TokenLogprobs:
    ids, logprobs = zip(*told.top, strict=True) if told.top else ((), ())
    return pb.TokenLogprobs(logprob=told.logprob, top_token_ids=ids, top_logprobs=logprobs)


def _decode_logprobs(message: pb.TokenLogprobs) -> TokenLogprobs:
    return TokenLogprobs(message.logprob, tuple(zip(message.top_token_ids, message.top_logprobs, strict=True)))


def _encode_maybe(told: TokenLogprobs | None) -> pb.TokenLogprobs | None:
    return None if told is None else _encode_logprobs(told)


def _decode_maybe(message: pb.Commit | pb.Complete | pb.DrawnToken) -> TokenLogprobs | None:
    return _decode_logprobs(message.logprobs) if message.HasField("logprobs") else None


def _encode_drawn(drawn: DrawnToken) -> pb.DrawnToken:
    return pb.DrawnToken(token_id=drawn.token_id, logprobs=_encode_maybe(drawn.logprobs))


def _decode_drawn(message: pb.DrawnToken) -> DrawnToken:
    return DrawnToken(message.token_id, _decode_maybe(message))


def encode_request(request: GenerationRequest) -> pb.GenerateRequest:
    """Gateway to decode."""
    return pb.GenerateRequest(
        request_id=request.request_id,
        tenant=request.tenant,
        prompt_token_ids=request.prompt_token_ids,
        max_tokens=request.max_tokens,
        sampling=encode_sampling(request.sampling),
        end_token_ids=sorted(request.end_token_ids),
        remaining_ms=to_milliseconds(request.remaining_s),
        prefill_candidates=request.prefill_candidates,
        num_choices=request.num_choices,
    )


def decode_request(message: pb.GenerateRequest) -> GenerationRequest:
    """At decode's door."""
    return _checked(
        "GenerateRequest",
        lambda: GenerationRequest(
            RequestId(message.request_id),
            TenantId(message.tenant),
            tuple(message.prompt_token_ids),
            message.max_tokens,
            _decode_sampling(message.sampling),
            frozenset(message.end_token_ids),
            message.remaining_ms / 1000,
            tuple(message.prefill_candidates),
            message.num_choices or 1,
        ),
    )


def encode_event(event: GenerationEvent) -> pb.GenerateEvent:
    """Decode to gateway."""
    match event:
        case TokensGenerated(token_ids, logprobs, choice):
            tokens = pb.Tokens(token_ids=token_ids, logprobs=map(_encode_logprobs, logprobs), choice=choice)
            return pb.GenerateEvent(tokens=tokens)
        case ChoiceFinished(choice, reason, num_generated_tokens):
            ended = pb.ChoiceFinished(choice=choice, reason=reason, num_generated_tokens=num_generated_tokens)
            return pb.GenerateEvent(choice_finished=ended)
        case Finished(reason, num_prompt_tokens, num_generated_tokens):
            finished = pb.Finished(
                reason=reason, num_prompt_tokens=num_prompt_tokens, num_generated_tokens=num_generated_tokens
            )
            return pb.GenerateEvent(finished=finished)
        case Rejected():
            return pb.GenerateEvent(rejected=encode_rejected(event))
        case Aborted():
            return pb.GenerateEvent(aborted=encode_aborted(event))


def decode_event(message: pb.GenerateEvent | None) -> GenerationEvent:
    """At the gateway. gRPC gives None for bytes that are no message."""
    if message is None:
        raise WireError("GenerateEvent: the bytes are no message")
    match message.WhichOneof("event"):
        case "tokens":
            return _checked("Tokens", lambda: _decode_tokens(message.tokens))
        case "choice_finished":
            return _checked("ChoiceFinished", lambda: _decode_choice_finished(message.choice_finished))
        case "finished":
            return _checked("Finished", lambda: _decode_finished(message.finished))
        case "rejected":
            return decode_rejected(message.rejected)
        case "aborted":
            return decode_aborted(message.aborted)
        case _:
            raise WireError("GenerateEvent: empty")


def _decode_tokens(message: pb.Tokens) -> TokensGenerated:
    return TokensGenerated(tuple(message.token_ids), tuple(map(_decode_logprobs, message.logprobs)), message.choice)


def _decode_choice_finished(message: pb.ChoiceFinished) -> ChoiceFinished:
    return ChoiceFinished(message.choice, FinishReason(message.reason), message.num_generated_tokens)


def _decode_finished(message: pb.Finished) -> Finished:
    return Finished(FinishReason(message.reason), message.num_prompt_tokens, message.num_generated_tokens)


def encode_rejected(verdict: Rejected) -> pb.Rejected:
    """With reason, code and status intact."""
    return pb.Rejected(
        reason=verdict.reason,
        message=verdict.message,
        code=verdict.code,
        http_status=verdict.http_status,
        param=verdict.param,
    )


def decode_rejected(message: pb.Rejected) -> Rejected:
    """With reason, code and status intact."""
    return _checked(
        "Rejected",
        lambda: Rejected(
            RejectReason(message.reason), message.message, message.code, message.http_status, message.param
        ),
    )


def encode_aborted(end: Aborted) -> pb.Aborted:
    """With reason, code and status intact."""
    return pb.Aborted(
        reason=end.reason,
        message=end.message,
        code=end.code,
        http_status=end.http_status,
        retryable=end.retryable,
    )


def decode_aborted(message: pb.Aborted) -> Aborted:
    """With reason, code and status intact."""
    return _checked(
        "Aborted",
        lambda: Aborted(
            AbortReason(message.reason), message.message, message.code, message.http_status, message.retryable
        ),
    )


def encode_up(message: AttemptUp) -> pb.AttemptUp:
    """Decode to prefill, within an attempt."""
    match message:
        case Proposal():
            return pb.AttemptUp(propose=_encode_proposal(message))
        case Grant(lease_id, nonce, epoch):
            return pb.AttemptUp(grant=pb.Grant(lease_id=lease_id, nonce=nonce, epoch=epoch))
        case Receipt(num_blocks):
            return pb.AttemptUp(receipt=pb.Receipt(num_blocks=num_blocks))


def decode_up(message: pb.AttemptUp) -> AttemptUp:
    """At prefill."""
    match message.WhichOneof("message"):
        case "propose":
            return _checked("Propose", lambda: _decode_proposal(message.propose))
        case "grant":
            return _checked("Grant", lambda: _decode_grant(message.grant))
        case "receipt":
            return Receipt(message.receipt.num_blocks)
        case _:
            raise WireError("AttemptUp: empty")


def encode_down(message: AttemptDown) -> pb.AttemptDown:
    """Prefill to decode, within an attempt."""
    match message:
        case Admitted(num_queued):
            return pb.AttemptDown(admitted=pb.Admitted(num_queued=num_queued))
        case Rejected():
            return pb.AttemptDown(rejected=encode_rejected(message))
        case Ready():
            return pb.AttemptDown(ready=pb.Ready())
        case Commit():
            return pb.AttemptDown(commit=_encode_commit(message))
        case Complete():
            return pb.AttemptDown(complete=_encode_complete(message))
        case Aborted():
            return pb.AttemptDown(aborted=encode_aborted(message))


def decode_down(message: pb.AttemptDown | None) -> AttemptDown:
    """At decode. gRPC gives None for bytes that are no message."""
    if message is None:
        raise WireError("AttemptDown: the bytes are no message")
    match message.WhichOneof("message"):
        case "admitted":
            return Admitted(message.admitted.num_queued)
        case "rejected":
            return decode_rejected(message.rejected)
        case "ready":
            return Ready()
        case "commit":
            return _checked("Commit", lambda: _decode_commit(message.commit))
        case "complete":
            return _checked("Complete", lambda: _decode_complete(message.complete))
        case "aborted":
            return decode_aborted(message.aborted)
        case _:
            raise WireError("AttemptDown: empty")


def _encode_commit(commit: Commit) -> pb.Commit:
    return pb.Commit(
        num_blocks=commit.num_blocks,
        num_tokens=commit.num_tokens,
        first_token_id=commit.first_token_id,
        logprobs=_encode_maybe(commit.logprobs),
        further=map(_encode_drawn, commit.further),
    )


def _decode_commit(message: pb.Commit) -> Commit:
    first = _decode_maybe(message), tuple(map(_decode_drawn, message.further))
    return Commit(message.num_blocks, message.num_tokens, message.first_token_id, *first)


def _encode_complete(complete: Complete) -> pb.Complete:
    return pb.Complete(
        first_token_id=complete.first_token_id,
        reason=complete.reason,
        logprobs=_encode_maybe(complete.logprobs),
        further=map(_encode_drawn, complete.further),
    )


def _decode_complete(message: pb.Complete) -> Complete:
    first = _decode_maybe(message), tuple(map(_decode_drawn, message.further))
    return Complete(message.first_token_id, FinishReason(message.reason), *first)


def _encode_proposal(proposal: Proposal) -> pb.Propose:
    return pb.Propose(
        request_id=proposal.request_id,
        attempt=proposal.attempt,
        tenant=proposal.tenant,
        prompt_token_ids=proposal.prompt_token_ids,
        max_tokens=proposal.max_tokens,
        sampling=encode_sampling(proposal.sampling),
        end_token_ids=sorted(proposal.end_token_ids),
        remaining_ms=to_milliseconds(proposal.remaining_s),
        decode_incarnation=proposal.decode_incarnation,
        epoch=proposal.epoch,
        fingerprint=proposal.fingerprint,
        num_choices=proposal.num_choices,
    )


def _decode_proposal(message: pb.Propose) -> Proposal:
    return Proposal(
        RequestId(message.request_id),
        message.attempt,
        TenantId(message.tenant),
        tuple(message.prompt_token_ids),
        message.max_tokens,
        _decode_sampling(message.sampling),
        frozenset(message.end_token_ids),
        message.remaining_ms / 1000,
        Incarnation(message.decode_incarnation),
        Epoch(message.epoch),
        message.fingerprint,
        message.num_choices or 1,
    )


def _decode_grant(message: pb.Grant) -> Grant:
    return Grant(LeaseId(message.lease_id), Nonce(message.nonce), Epoch(message.epoch))
