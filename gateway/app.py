"""The gateway's composition root: builds every long-lived object and closes them in reverse.

Never: imports torch, or decides anything about a request.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Callable
from contextlib import AbstractContextManager, AsyncExitStack, nullcontext, suppress

import uvicorn
from prometheus_client import CollectorRegistry

from gateway.body import Bodies
from gateway.cluster import PREFILL, Cluster
from gateway.config import GatewayConfig
from gateway.decode_client import StatusClient
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


def load_model(config: GatewayConfig) -> ServedModel:
    """What the gateway needs of the model: no weights."""
    facts = ModelFacts.read(config.model)
    context_length = min(facts.context_length, config.max_model_len or facts.context_length)
    return ServedModel(
        name=config.served_model_name or config.model.name,
        vocab_size=facts.vocab_size,
        context_length=context_length,
        end_token_ids=facts.end_token_ids,
        fingerprint=facts.fingerprint.hex(),
        codec=Tokenizer.load(config.model),
        template=ChatTemplate.load(config.model),
        bound=read_text_bound(config.model),
    )


async def run(config: GatewayConfig, ready: Callable[[str], None]) -> None:
    """Serve until told to stop; `ready` is called with the address once it listens, which is before it can serve."""
    listener = _listen(config.host, config.port)
    async with AsyncExitStack() as stack:
        await _serve(config, listener, stack, ready)


async def _serve(
    config: GatewayConfig, listener: socket.socket, stack: AsyncExitStack, ready: Callable[[str], None]
) -> None:
    limits, model = Limits(), load_model(config)
    cluster = Cluster(config.decode_servers, config.prefill_servers, limits)
    decode = {a: GrpcDecodeClient(a, config.secret, model.context_length) for a in config.decode_servers}
    prefill = {a: GrpcStatusClient(PREFILL, a, config.secret, model.context_length) for a in config.prefill_servers}
    clients: dict[str, StatusClient] = {**decode, **prefill}
    for decode_client in decode.values():
        stack.push_async_callback(decode_client.close)
    for prefill_client in prefill.values():
        stack.push_async_callback(prefill_client.close)
    preparation = Preparation(limits)
    stack.callback(preparation.close)
    poller = Poller(cluster, clients, limits)
    service = Service(model, cluster, decode, preparation, config.default_max_tokens, limits)
    service.on_suspect = poller.ask_soon
    registry = CollectorRegistry()
    registry.register(ClusterCollector(cluster))
    exchanges = Exchanges(
        service, Tenants(config.api_keys), Bodies(limits), Journal(registry), config.deadline_s, limits
    )
    warm_up = WarmUp(cluster, decode, limits)
    app = build_http(exchanges, Pages(exchanges, cluster, warm_up, registry))
    for work in (poller.run(), warm_up.run()):
        stack.push_async_callback(_ended, asyncio.create_task(work))
    server = _Uvicorn(
        uvicorn.Config(
            app, log_config=None, access_log=False, lifespan="off", timeout_keep_alive=30, server_header=False
        )
    )
    host, port = listener.getsockname()[:2]
    ready(f"{host}:{port}")
    await _until_stopped(server, listener, exchanges, limits)


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
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise SystemExit(f"{host}:{port} cannot be listened on ({error.strerror}): choose another --port") from None
    return listener


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    with suppress(asyncio.CancelledError):
        await task
