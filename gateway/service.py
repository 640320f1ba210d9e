"""The life of one request behind the HTTP edge: route, generate, text, one end.

Never: speaks HTTP.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass

from gateway.answers import Usage
from gateway.cluster import Cluster
from gateway.decode_claims import Expected
from gateway.decode_client import DecodeClient
from gateway.jobs import Bounds, Job, Parser
from gateway.limits import Limits
from gateway.model import ServedModel
from gateway.openai_errors import ApiError, from_verdict, unavailable
from gateway.preparation import Preparation
from gateway.routing import Route, Router
from gateway.text import TextAssembler
from gateway.texts import AnswerTexts, Text
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    ChoiceFinished,
    Finished,
    FinishReason,
    GenerationRequest,
    Rejected,
    RequestId,
    TenantId,
    TokensGenerated,
)
from kvlease.handoff.verdicts import aborted


@dataclass(frozen=True, slots=True)
class Ticket:
    """Whose request it is and until when: `deadline_at` by the event loop's clock."""

    request_id: RequestId
    tenant: TenantId
    deadline_at: float


@dataclass(frozen=True, slots=True)
class Done:
    """The good end; `reason` is the first choice's."""

    usage: Usage
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Failed:
    """The bad end."""

    error: ApiError


TextEvent = Text | Done | Failed


class Service:
    """Prepares jobs and generates their text."""

    def __init__(
        self,
        model: ServedModel,
        cluster: Cluster,
        clients: Mapping[str, DecodeClient],
        preparation: Preparation,
        default_max_tokens: int,
        limits: Limits,
    ) -> None:
        """`clients` by the decode server's address; `default_max_tokens` is a chat's."""
        self.model = model
        self.router = Router(cluster)
        self._cluster = cluster
        self._clients = clients
        self._preparation = preparation
        self._default_max_tokens = default_max_tokens
        self._limits = limits
        self.on_suspect: Callable[[str], None] = lambda _: None

    def max_model_len(self) -> int:
        """The longest context that a request may use now, in tokens; before any server was seen, what the model was made for."""
        served = self._cluster.max_model_len()
        return min(served, self.model.context_length) if served else self.model.context_length

    async def prepare(self, parse: Parser, data: bytes) -> Job:
        """A job from a body, made in a thread. Raises RequestRefused."""
        bounds = Bounds(self.max_model_len(), self._default_max_tokens, self._limits)
        return await self._preparation.run(lambda: parse(data, self.model, bounds))

    async def generate(self, job: Job, ticket: Ticket) -> AsyncGenerator[TextEvent, None]:
        """Text as it comes, ending with exactly one Done or Failed. Closing the iterator cancels the request everywhere."""
        texts = AnswerTexts(
            [
                TextAssembler(self.model.codec.detokenizer(), job.stops, job.sampling.min_tokens)
                for _ in range(job.num_choices)
            ]
        )
        tried: list[str] = []
        failure = self._no_server()
        while len(tried) < self._limits.max_attempts:
            route = self.router.route(len(job.prompt_token_ids), job.num_tokens, tried)
            request = self._request(job, ticket, route, len(tried)) if route else None
            if route is None or request is None:
                yield Failed(failure if route is None else _deadline_passed())
                return
            tried.append(route.decode)
            verdict: Aborted | None = None
            with self.router.occupy(route.decode):
                async with aclosing(self._attempt(route.decode, request, texts)) as events:
                    async for event in events:
                        if isinstance(event, Aborted):
                            verdict = event
                        else:
                            yield event
            if verdict is None:
                return
            self._learn(route.decode, verdict)
            failure = from_verdict(verdict, self._limits.retry_after_s)
            if texts.num_tokens or not verdict.retryable:
                break
        yield Failed(failure)

    async def _attempt(
        self, address: str, request: GenerationRequest, texts: AnswerTexts
    ) -> AsyncGenerator[TextEvent | Aborted, None]:
        """One attempt; an `Aborted` is handed up, since it may be tried again."""
        expected = Expected.of(request, self.model.vocab_size)
        num_heard: Counter[int] = Counter()  # tokens of each choice, those behind a stop string too
        async with aclosing(self._clients[address].generate(request)) as events:
            async for event in events:
                match event:
                    case TokensGenerated() | ChoiceFinished() | Finished():
                        num_before = num_heard.total() if isinstance(event, Finished) else num_heard[event.choice]
                        wrong = expected.contradiction(event, num_before)
                        if wrong is not None:
                            message = f"decode server {address} contradicts itself: {wrong}"
                            yield aborted(AbortReason.PROTOCOL_ERROR, message)
                            return
                        if isinstance(event, TokensGenerated):
                            num_heard[event.choice] += len(event.token_ids)
                        for news in texts.take(event):
                            yield news
                        if texts.is_done:
                            yield Done(Usage(len(request.prompt_token_ids), texts.num_tokens), texts.reason)
                            return
                    case Rejected():
                        yield Failed(from_verdict(event, self._limits.retry_after_s))
                        return
                    case Aborted():
                        yield event
                        return
        yield _ended_early(address)

    def _request(self, job: Job, ticket: Ticket, route: Route, num_tried: int) -> GenerationRequest | None:
        """What decode gets, or None when the deadline has passed. Each attempt has an id of its own."""
        remaining_s = ticket.deadline_at - asyncio.get_running_loop().time()
        if remaining_s <= 0:
            return None
        suffix = f".{num_tried + 1}" if num_tried else ""
        return GenerationRequest(
            request_id=RequestId(ticket.request_id + suffix),
            tenant=ticket.tenant,
            prompt_token_ids=job.prompt_token_ids,
            max_tokens=job.max_tokens,
            sampling=job.sampling,
            end_token_ids=job.end_token_ids,
            remaining_s=remaining_s,
            prefill_candidates=route.prefill_candidates,
            num_choices=job.num_choices,
        )

    def _learn(self, address: str, verdict: Aborted) -> None:
        """A lost peer is known at once: nothing goes there until its next good poll, which is asked for now."""
        if verdict.reason is AbortReason.PEER_LOST:
            for server in self._cluster.decode:
                if server.address == address:
                    server.failed()
            self.on_suspect(address)

    def _no_server(self) -> ApiError:
        message = "No decode server can take the request now; try again."
        return unavailable(message, "no_server", self._limits.retry_after_s)


def _deadline_passed() -> ApiError:
    return ApiError(504, "The request's deadline passed before it could be sent on.", "deadline_exceeded")


def _ended_early(address: str) -> Aborted:
    message = f"The stream from decode server {address} ended without a verdict."
    return Aborted(AbortReason.PROTOCOL_ERROR, message, "stream_ended_early", 502, retryable=True)
