"""The gateway's composition root: builds every long-lived object and closes them in reverse.

Never: imports torch, or decides anything about a request.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager, nullcontext, suppress
from dataclasses import dataclass

import uvicorn
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from gateway.body import Bodies
from gateway.cluster import PREFILL, Cluster
from gateway.config import GatewayConfig
from gateway.decode_client import DecodeClient, StatusClient
from gateway.errors import StartRefused
from gateway.exchange import Exchanges
from gateway.http import Pages, build_http
from gateway.journal import ClusterCollector, Journal
from gateway.limits import Limits
from gateway.model import ServedModel
from gateway.polling import Poller
from gateway.preparation import Preparation
from gateway.rpc import GrpcDecodeClient, GrpcStatusClient
from gateway.service import Service
from gateway.tenants import Tenants
from gateway.text_bounds import read_text_bound
from gateway.warm_up import WarmUp
from kvlease.models.chat_template import ChatTemplate
from kvlease.models.facts import ModelFacts
from kvlease.models.tokenizer import Tokenizer
from kvlease.peering.hosting import ended


def load_model(config: GatewayConfig) -> ServedModel:
    """What the gateway needs of the model: no weights."""
    facts = ModelFacts.read(config.model)
    context_length = min(facts.context_length, config.max_model_len or facts.context_length)
    return ServedModel(
        name=config.served_model_name or config.model.name,
        vocab_size=facts.vocab_size,
        context_length=context_length,
        end_token_ids=facts.end_token_ids,
        fingerprint=facts.fingerprint.hex()[:12],
        codec=Tokenizer.load(config.model),
        template=ChatTemplate.load(config.model),
        bound=read_text_bound(config.model),
        created=int((config.model / "config.json").stat().st_mtime),
    )


@dataclass(frozen=True, slots=True)
class Gateway:
    """What a gateway is made of, as far as whoever runs it needs to know."""

    app: FastAPI
    exchanges: Exchanges
    cluster: Cluster
    poller: Poller
    warm_up: WarmUp
    preparation: Preparation

    @asynccontextmanager
    async def at_work(self) -> AsyncGenerator[None, None]:
        """Polls and warms up for as long as the block lasts."""
        async with AsyncExitStack() as stack:
            stack.callback(self.preparation.close)
            for work in (self.poller.run(), self.warm_up.run(self.poller)):
                stack.push_async_callback(ended, asyncio.create_task(work))
            yield


def assemble(
    config: GatewayConfig,
    model: ServedModel,
    decode: Mapping[str, DecodeClient],
    prefill: Mapping[str, StatusClient],
    limits: Limits,
) -> Gateway:
    """All parts, connected and at rest. The clients are by address, in the order of the configuration."""
    cluster = Cluster(tuple(decode), tuple(prefill), limits)
    poller = Poller(cluster, {**decode, **prefill}, limits)
    preparation = Preparation(limits)
    service = Service(model, cluster, decode, preparation, config.default_max_tokens, limits)
    service.on_suspect = poller.ask_soon
    registry = CollectorRegistry()
    registry.register(ClusterCollector(cluster))
    exchanges = Exchanges(
        service, Tenants(config.api_keys), Bodies(limits), Journal(registry), config.deadline_s, limits
    )
    warm_up = WarmUp(cluster, decode, limits)
    app = build_http(exchanges, Pages(exchanges, cluster, warm_up, registry))
    return Gateway(app, exchanges, cluster, poller, warm_up, preparation)


async def run(config: GatewayConfig, ready: Callable[[str], None]) -> None:
    """Serve until told to stop; `ready` is called with the address once it listens, which is before it can serve.

    Raises StartRefused for an address that cannot be had, and what kvlease.models raises for a folder that cannot be served.
    """
    listener = _listen(config.host, config.port)
    async with AsyncExitStack() as stack:
        limits, model = Limits(), load_model(config)
        decode = {a: GrpcDecodeClient(a, config.secret, model.context_length) for a in config.decode_servers}
        prefill = {a: GrpcStatusClient(PREFILL, a, config.secret, model.context_length) for a in config.prefill_servers}
        for close in [*(client.close for client in decode.values()), *(client.close for client in prefill.values())]:
            stack.push_async_callback(close)
        gateway = assemble(config, model, decode, prefill, limits)
        await stack.enter_async_context(gateway.at_work())
        server = http_server(gateway.app, limits)
        host, port = listener.getsockname()[:2]
        ready(f"{host}:{port}")
        await _until_stopped(server, listener, gateway.exchanges, limits)


def http_server(app: FastAPI, limits: Limits) -> uvicorn.Server:
    """uvicorn, kept quiet: the journal writes the one line a request."""
    return _Uvicorn(
        uvicorn.Config(
            app,
            http="h11",  # the strictest of its parsers
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            proxy_headers=False,  # a client does not choose who it is
            limit_concurrency=limits.max_connections,
            timeout_keep_alive=limits.keep_alive_s,
            timeout_graceful_shutdown=limits.stop_s,
        )
    )


async def _until_stopped(server: uvicorn.Server, listener: socket.socket, exchanges: Exchanges, limits: Limits) -> None:
    """Serve; at the first signal let in nothing new, let what runs end within `drain_s`, then stop."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait([serving, stopping], return_when=asyncio.FIRST_COMPLETED)
    exchanges.is_draining = True
    with suppress(TimeoutError):
        async with asyncio.timeout(limits.drain_s):
            await exchanges.wait_until_none()
    exchanges.abort_all()
    server.should_exit = True
    await serving
    stopping.cancel()


class _Uvicorn(uvicorn.Server):
    """uvicorn without its own signal handlers: draining is ours."""

    def capture_signals(self) -> AbstractContextManager[None]:  # type: ignore[override]
        """None to capture."""
        return nullcontext()


def _listen(host: str, port: int) -> socket.socket:
    """Taken before anything slow happens, so that an address in use is told at once."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=Limits().max_connections)
    except OSError as error:
        reason = error.strerror or str(error)
        raise StartRefused(f"{host}:{port} cannot be listened on ({reason}): choose another --host or --port") from None
