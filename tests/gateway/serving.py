"""A real gateway on a real socket, in front of servers that do what a test tells them.

Never: replaces a part of the gateway itself; only the contracts behind it have stand-ins.
"""

from __future__ import annotations

import asyncio
import functools
import socket
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ParamSpec

import httpx

from gateway.app import Gateway, assemble, http_server, load_model
from gateway.cluster import DECODE, PREFILL, PairFacts, ServerFacts
from gateway.config import GatewayConfig
from gateway.limits import Limits
from gateway.model import ServedModel
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    TokensGenerated,
)
from tests.waiting import until

P = ParamSpec("P")
Script = Callable[[GenerationRequest], AsyncGenerator[GenerationEvent, None]]

QUICK = Limits(poll_s=0.02, poll_soon_s=0.01, warm_up_pause_s=0.01, deadline_grace_s=0.1, drain_s=2.0, last_word_s=0.5)
LOST = Aborted(AbortReason.PEER_LOST, "decode is gone", "peer_lost", 502, retryable=True)


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Runs an asynchronous test on a loop of its own."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def decode_facts(address: str = "decode:1", **changes: Any) -> ServerFacts:
    pair = PairFacts("prefill:1", "tcp", 1, "ready")
    return replace(_facts(DECODE, address), **{"max_model_len": 1024, "pairs": (pair,), **changes})


def prefill_facts(address: str = "prefill:1", **changes: Any) -> ServerFacts:
    return replace(_facts(PREFILL, address), **changes)


def _facts(role: str, address: str) -> ServerFacts:
    return ServerFacts(
        role=role,
        address=address,
        incarnation="00" * 16,
        model="tiny",
        dtype="float32",
        block_size=16,
        blocks_free=128,
        blocks_reserved=0,
        blocks_filling=0,
        blocks_readable=0,
        blocks_total=128,
        num_queued=0,
        num_running=0,
        max_model_len=0,
    )


@dataclass
class FakeServer:
    """Answers polls with `facts`; None: unreachable."""

    facts: ServerFacts | None
    address: str = ""

    def __post_init__(self) -> None:
        if not self.address:
            assert self.facts is not None, "a server that never answered needs an address"
            self.address = self.facts.address

    async def status(self) -> ServerFacts | None:
        return self.facts


@dataclass
class FakeDecode(FakeServer):
    """Plays `script` for each request but the warm-up's; counts what is open and what was closed before its end."""

    script: Script = field(default_factory=lambda: says([]))
    warm_up_script: Script = field(default_factory=lambda: says([1, 2], FinishReason.LENGTH))
    requests: list[GenerationRequest] = field(default_factory=list)
    warm_ups: list[GenerationRequest] = field(default_factory=list)
    num_open: int = 0
    num_cancelled: int = 0

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        is_warm_up = request.tenant == "kvlease-warm-up"
        (self.warm_ups if is_warm_up else self.requests).append(request)
        self.num_open += 1
        has_ended = False
        events = (self.warm_up_script if is_warm_up else self.script)(request)
        try:
            async for event in events:
                has_ended = not isinstance(event, TokensGenerated)
                yield event
        finally:
            await events.aclose()
            self.num_open -= 1
            self.num_cancelled += not has_ended


def says(token_ids: Sequence[int], reason: FinishReason = FinishReason.STOP, at_once: int = 1) -> Script:
    """The tokens, `at_once` in each event, cut at max_tokens like a real server's."""

    async def script(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        ids = tuple(token_ids)[: request.max_tokens]
        for start in range(0, len(ids), at_once):
            yield TokensGenerated(ids[start : start + at_once])
            await asyncio.sleep(0)
        is_cut = len(ids) == request.max_tokens or reason is FinishReason.LENGTH
        final = FinishReason.LENGTH if is_cut else FinishReason.STOP
        yield Finished(final, len(request.prompt_token_ids), len(ids) + (not is_cut))

    return script


def ends_with(event: GenerationEvent, after: Sequence[int] = ()) -> Script:
    """Some tokens, then this."""

    async def script(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        for token_id in after:
            yield TokensGenerated((token_id,))
        yield event

    return script


def goes_silent(after: Sequence[int] = ()) -> Script:
    """Some tokens, then nothing, for ever."""

    async def script(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        for token_id in after:
            yield TokensGenerated((token_id,))
        await asyncio.Event().wait()

    return script


@dataclass(frozen=True)
class Running:
    """A gateway that serves, what stands behind it, and a client."""

    gateway: Gateway
    url: str
    http: httpx.AsyncClient
    decode: tuple[FakeDecode, ...]
    prefill: tuple[FakeServer, ...]
    model: ServedModel

    @property
    def port(self) -> int:
        return int(self.url.rsplit(":", 1)[1])

    async def complete(self, **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "prompt": "hello", **fields}
        return await self.http.post("/v1/completions", json=body)

    async def chat(self, text: str = "hello", **fields: Any) -> httpx.Response:
        body = {"model": "tiny", "messages": [{"role": "user", "content": text}], **fields}
        return await self.http.post("/v1/chat/completions", json=body)

    async def until_quiet(self) -> None:
        """Nothing is open any more, here and behind."""
        await until(lambda: not any(server.num_open for server in self.decode), what="decode is done")
        await until(lambda: self.gateway.exchanges.num_open == 0, what="no exchange is open")


def config(**changes: Any) -> GatewayConfig:
    return replace(GatewayConfig(Path(), "", (), (), served_model_name="tiny"), **changes)


@asynccontextmanager
async def serving(
    folder: Path,
    *decode: FakeDecode,
    prefill: Sequence[FakeServer] = (),
    limits: Limits = QUICK,
    is_ready: bool = True,
    **changes: Any,
) -> AsyncGenerator[Running, None]:
    """A gateway over these servers; with `is_ready`, once it could say so."""
    settings = config(model=folder, **changes)
    model = load_model(settings)
    servers = decode or (FakeDecode(decode_facts()),)
    behind = tuple(prefill) or (FakeServer(prefill_facts()),)
    gateway = assemble(settings, model, {s.address: s for s in servers}, {s.address: s for s in behind}, limits)
    listener = socket.create_server(("127.0.0.1", 0))
    server = http_server(gateway.app, limits)
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with gateway.at_work(), httpx.AsyncClient(base_url=url, timeout=10) as http:
        task = asyncio.create_task(server.serve(sockets=[listener]))
        await until(lambda: server.started, what="listening")
        if is_ready:
            await until(gateway.warm_up.can_serve, what="ready")
        try:
            yield Running(gateway, url, http, tuple(servers), behind, model)
        finally:
            server.should_exit = True
            with suppress(asyncio.CancelledError):
                await task


def events_of(response: httpx.Response) -> list[str]:
    """The data of each server-sent event."""
    blocks = response.text.split("\n\n")
    assert blocks.pop() == "", "the last event is complete"
    return [line.removeprefix("data: ") for block in blocks for line in block.split("\n") if line.startswith("data: ")]
