"""The life of one request on decode: the door, the attempts, the text.

Never: emits more than one terminal event, or holds anything when the request has ended.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from decode_server.attempts import Arrived, AttemptEnd, AttemptRun
from decode_server.memory import DecodeMemory
from decode_server.peers import Peer, Peers
from decode_server.sequences import RunningBatch, Sequence
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.limits import Limits
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Complete,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Incarnation,
    Proposal,
    Rejected,
    RejectReason,
    TokensGenerated,
)
from kvlease.handoff.verdicts import DecodeFacts, aborted, judge_request, may_ask_another, rejected

logger = logging.getLogger(__name__)

Emit = Callable[[GenerationEvent], Awaitable[None]]
Terminal = Finished | Rejected | Aborted


@dataclass(frozen=True, slots=True)
class Identity:
    """What a decode server is, for its door and its proposals. Tokens where not said otherwise."""

    incarnation: Incarnation
    fingerprint: bytes
    pool_tokens: int
    context_length: int
    vocab_size: int
    max_queue: int


class DecodeService:
    """All requests of one decode server."""

    def __init__(
        self, identity: Identity, peers: Peers, memory: DecodeMemory, batch: RunningBatch, thread: WorkThread
    ) -> None:
        """No request yet."""
        self._identity, self._peers, self._memory, self._batch, self._thread = identity, peers, memory, batch, thread
        self._limits = Limits()
        self.counters: Counter[str] = Counter()
        self.num_waiting = 0
        self.is_draining = False

    @property
    def max_model_len(self) -> int:
        """The longest context (tokens) that can be served now; 0: no pair is ready."""
        own = min(self._identity.pool_tokens, self._identity.context_length)
        return min(own, self._peers.capacity())

    async def serve(self, request: GenerationRequest, emit: Emit) -> None:
        """Everything that becomes of the request; the last event is its one terminal event."""
        try:
            async with asyncio.timeout(request.remaining_s):
                end = self._door(request) or await self._attempt(request, emit)
        except TimeoutError:
            end = aborted(AbortReason.DEADLINE, "the deadline has passed")
        self.counters[f"requests_{_outcome(end)}"] += 1
        await emit(end)

    def _door(self, request: GenerationRequest) -> Rejected | None:
        identity = self._identity
        facts = DecodeFacts(
            identity.pool_tokens,
            identity.context_length,
            identity.vocab_size,
            self.num_waiting,
            identity.max_queue,
            self.is_draining,
        )
        return judge_request(request, facts)

    async def _attempt(self, request: GenerationRequest, emit: Emit) -> Terminal:
        """Attempts, until one arrives or there is no sense in another."""
        deadline = time.monotonic() + request.remaining_s
        last: Terminal = rejected(RejectReason.NO_PREFILL, "no prefill server is paired and ready")
        for number in range(1, self._limits.max_attempts + 1):
            candidates = self._peers.candidates(request.prefill_candidates)
            if not candidates:
                break
            peer = candidates[(number - 1) % len(candidates)]
            end = await self._one_attempt(request, number, peer, deadline)
            if isinstance(end, Arrived):
                return await self._generate(request, end, emit)
            if isinstance(end, Complete):
                return await self._complete(request, end, emit)
            last = end
            if not is_worth_another(end):
                break
            self.counters["attempts_failed"] += 1
            logger.warning(
                "attempt.failed",
                extra={
                    "request": request.request_id,
                    "attempt": number,
                    "reason": str(end.reason),
                    "detail": end.message,
                },
            )
        return last

    async def _one_attempt(self, request: GenerationRequest, number: int, peer: Peer, deadline: float) -> AttemptEnd:
        proposal = Proposal(
            request.request_id,
            number,
            request.tenant,
            request.prompt_token_ids,
            request.max_tokens,
            request.sampling,
            request.end_token_ids,
            deadline - time.monotonic(),
            self._identity.incarnation,
            peer.pair.epoch,
            self._identity.fingerprint,
        )
        self.num_waiting += 1
        try:
            return await AttemptRun(proposal, peer, self._memory, self._thread).run()
        finally:
            self.num_waiting -= 1

    async def _complete(self, request: GenerationRequest, end: Complete, emit: Emit) -> Terminal:
        if end.reason is FinishReason.LENGTH:
            await emit(TokensGenerated((end.first_token_id,)))
        return Finished(end.reason, len(request.prompt_token_ids), 1)

    async def _generate(self, request: GenerationRequest, arrived: Arrived, emit: Emit) -> Terminal:
        sequence = Sequence(request, arrived.room, list(request.prompt_token_ids))
        kv = self._memory.kv
        try:
            num_prompt_blocks = -(-len(request.prompt_token_ids) // kv.block_size)
            kv.pool.publish(arrived.room.holder, arrived.room.handles[:num_prompt_blocks])
            if not sequence.take(arrived.first_token_id):
                self._batch.join(sequence)
            while True:
                event = await sequence.events.get()
                if not isinstance(event, TokensGenerated):
                    assert isinstance(event, Finished | Aborted), "a sequence ends by one of these"
                    return event
                await emit(event)
        finally:
            sequence.is_over = True
            self._batch.leave(sequence)
            kv.free(arrived.room)


def is_worth_another(end: Rejected | Aborted) -> bool:
    """Whether the next candidate may do better."""
    return may_ask_another(end) if isinstance(end, Rejected) else end.retryable


def _outcome(end: Terminal) -> str:
    return f"finished_{end.reason}" if isinstance(end, Finished) else f"{type(end).__name__.lower()}_{end.reason}"
