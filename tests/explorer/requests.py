"""The requests of a scenario, and the values that the servers would make of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from kvlease.handoff.messages import (
    Epoch,
    GenerationRequest,
    Grant,
    Incarnation,
    LeaseId,
    Nonce,
    Proposal,
    RequestId,
    TenantId,
)
from kvlease.sampling.params import SamplingParams
from tests.explorer.ghost import LAYOUT, token_at

FINGERPRINT = LAYOUT.fingerprint(b"m" * 16)
VOCABULARY = 1000


@dataclass(frozen=True, slots=True)
class Spec:
    """One request: so many prompt tokens, so many asked for; `ends_at_first`: its first token is an end token."""

    num_tokens: int
    max_tokens: int
    ends_at_first: bool = False


@dataclass(frozen=True, slots=True)
class Scenario:
    """One world: its requests, each of a tenant of its own, and how many faults may happen in one run."""

    name: str
    specs: tuple[Spec, ...]
    max_faults: int
    faults: frozenset[str]
    prefill_blocks: int = 3
    decode_blocks: int = 3
    chunk_tokens: int = 2


@lru_cache(None)
def request_value(index: int, spec: Spec) -> GenerationRequest:
    tokens = tuple(10 + 40 * index + position for position in range(spec.num_tokens))
    ends = frozenset({token_at(index, spec.num_tokens)} if spec.ends_at_first else {999})
    return GenerationRequest(
        RequestId(f"r{index}"), TenantId(f"t{index}"), tokens, spec.max_tokens, SamplingParams(), ends, 5.0, ()
    )


@lru_cache(None)
def proposal_value(index: int, spec: Spec, attempt: int, epoch: int) -> Proposal:
    request = request_value(index, spec)
    return Proposal(
        request.request_id,
        attempt,
        request.tenant,
        request.prompt_token_ids,
        request.max_tokens,
        request.sampling,
        request.end_token_ids,
        request.remaining_s,
        Incarnation(b"d" * 16),
        Epoch(epoch),
        FINGERPRINT,
    )


@lru_cache(None)
def grant_value(index: int, attempt: int, epoch: int) -> Grant:
    name = bytes((index, attempt, epoch))
    return Grant(LeaseId(b"lease" + name + bytes(8)), Nonce(b"nonce" + name + bytes(8)), Epoch(epoch))
