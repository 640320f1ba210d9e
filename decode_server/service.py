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
from decode_server.memory import DecodeMemory, Rooms
from decode_server.peers import Peer, Peers
from decode_server.sequences import Events, RunningBatch, Sequence
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.limits import Limits
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    ChoiceFinished,
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
from kvlease.kvcache.sizing import blocks_for

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
            self._memory.kv.block_size,
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
            request.num_choices,
        )
        self.num_waiting += 1
        try:
            return await AttemptRun(proposal, peer, self._memory, self._thread, self._identity.vocab_size).run()
        finally:
            self.num_waiting -= 1

    async def _complete(self, request: GenerationRequest, end: Complete, emit: Emit) -> Terminal:
        for choice, drawn in enumerate(end.first_tokens):
            has_ended = drawn.token_id in request.end_token_ids
            if not has_ended:
                await emit(TokensGenerated.of(drawn, choice))
            if request.num_choices > 1:
                await emit(ChoiceFinished(choice, FinishReason.STOP if has_ended else FinishReason.LENGTH, 1))
        return Finished(end.reason, len(request.prompt_token_ids), request.num_choices)

    async def _generate(self, request: GenerationRequest, arrived: Arrived, emit: Emit) -> Terminal:
        rooms = dict(enumerate(arrived.rooms))
        sequences: list[Sequence] = []
        events: Events = asyncio.Queue()

        def free(choice: int) -> None:
            self._memory.kv.free(rooms.pop(choice))

        try:
            rooms = dict(enumerate(await self._branched(request, arrived.rooms)))
            sequences = Sequence.begin(request, tuple(rooms.values()), events, free)
            for sequence, drawn in zip(sequences, arrived.first, strict=True):
                if not sequence.take(drawn):
                    self._batch.join(sequence)
            ends: dict[int, ChoiceFinished] = {}
            while len(ends) < len(sequences):
                event = await events.get()
                if isinstance(event, Aborted):
                    return event
                if isinstance(event, ChoiceFinished):
                    ends[event.choice] = event
                if isinstance(event, TokensGenerated) or request.num_choices > 1:
                    await emit(event)
            num_generated = sum(end.num_generated_tokens for end in ends.values())
            return Finished(ends[0].reason, len(request.prompt_token_ids), num_generated)
        finally:
            for sequence in sequences:
                sequence.is_over = True
                self._batch.leave(sequence)
            for room in rooms.values():
                self._memory.kv.free(room)

    async def _branched(self, request: GenerationRequest, rooms: Rooms) -> Rooms:
        """The rooms of all choices, once the prompt that lies in the first is in each of them."""
        kv, first, num_tokens = self._memory.kv, rooms[0], len(request.prompt_token_ids)
        kv.pool.publish(first.holder, first.handles[: blocks_for(num_tokens, kv.block_size)])
        branches = tuple(kv.branch(first, own, num_tokens) for own in rooms[1:])
        for branch in branches:
            kv.pin((first, branch))
            try:
                await self._thread.run(kv.fill_branch, first, branch, num_tokens)
            finally:
                kv.unpin((first, branch))
        return (first, *branches)


def is_worth_another(end: Rejected | Aborted) -> bool:
    """Whether the next candidate may do better."""
    return may_ask_another(end) if isinstance(end, Rejected) else end.retryable


def _outcome(end: Terminal) -> str:
    return f"finished_{end.reason}" if isinstance(end, Finished) else f"{type(end).__name__.lower()}_{end.reason}"
