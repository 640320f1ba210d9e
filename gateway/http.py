"""The routes. Each is a few lines: what it means is elsewhere.

Never: answers an error in any shape but OpenAI's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from fastapi import FastAPI
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from gateway.answers import ChatShape, CompletionShape
from gateway.cluster import Cluster, ServerFacts, ServerView
from gateway.errors import RequestRefused
from gateway.exchange import Api, Exchanges
from gateway.jobs import parse_chat, parse_completion
from gateway.openai_errors import ApiError, echo
from gateway.warm_up import WarmUp

COMPLETIONS = Api("completions", parse_completion, CompletionShape())
CHAT = Api("chat", parse_chat, ChatShape())


@dataclass(frozen=True, slots=True)
class Generation:
    """An ASGI endpoint of its own: it watches the connection itself, which a framework's handler cannot."""

    exchanges: Exchanges
    api: Api

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """One request."""
        await self.exchanges.serve(self.api, scope, receive, send)


class Pages:
    """Everything that is not generation."""

    def __init__(self, exchanges: Exchanges, cluster: Cluster, warm_up: WarmUp, registry: CollectorRegistry) -> None:
        """They only read."""
        self._exchanges, self._cluster, self._warm_up, self._registry = exchanges, cluster, warm_up, registry

    async def models(self, request: Request) -> Response:
        """GET /v1/models."""
        self._exchanges.tenants.authenticate(request.headers)
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        """GET /v1/models/{name}."""
        self._exchanges.tenants.authenticate(request.headers)
        name = request.path_params["name"]
        if name != self._exchanges.service.model.name:
            raise RequestRefused(ApiError(404, f"The model {echo(name)} does not exist.", "model_not_found", "model"))
        return JSONResponse(self._card())

    async def health(self, _request: Request) -> Response:
        """GET /health: this process answers."""
        return JSONResponse({"status": "ok"})

    async def ready(self, _request: Request) -> Response:
        """GET /ready: a prompt went through a pair, and one can serve now."""
        is_ready = self._warm_up.can_serve() and not self._exchanges.is_draining
        body = {
            "ready": is_ready,
            "warmed_up": self._warm_up.is_done,
            "model": self._exchanges.service.model.name,
            "max_model_len": self._exchanges.service.max_model_len() if is_ready else 0,
            "pairs": [
                {"decode": server.address, **asdict(pair)}
                for server in self._cluster.decode
                if server.facts is not None and server.is_in
                for pair in server.facts.pairs
            ],
            "transports": {
                server.address: server.facts.transport for server in self._cluster.servers if server.facts is not None
            },
        }
        return JSONResponse(body, 200 if is_ready else 503)

    async def status(self, request: Request) -> Response:
        """GET /status: every server, for `kvlease status`."""
        self._exchanges.tenants.authenticate(request.headers)
        return JSONResponse({"servers": [_described(server) for server in self._cluster.servers]})

    async def metrics(self, _request: Request) -> Response:
        """GET /metrics, for Prometheus."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

    def _card(self) -> Mapping[str, object]:
        service = self._exchanges.service
        return service.model.card(service.max_model_len())


def build_http(exchanges: Exchanges, pages: Pages) -> FastAPI:
    """The application."""
    app = FastAPI(title="kvlease", docs_url=None, redoc_url=None, openapi_url=None)
    app.router.redirect_slashes = False
    app.router.routes.append(Route("/v1/completions", Generation(exchanges, COMPLETIONS), methods=["POST"]))
    app.router.routes.append(Route("/v1/chat/completions", Generation(exchanges, CHAT), methods=["POST"]))
    for path, page in (
        ("/v1/models", pages.models),
        ("/v1/models/{name:path}", pages.model),
        ("/health", pages.health),
        ("/ready", pages.ready),
        ("/status", pages.status),
        ("/metrics", pages.metrics),
    ):
        app.router.routes.append(Route(path, page, methods=["GET"]))
    app.add_exception_handler(HTTPException, _no_such_thing)
    app.add_exception_handler(RequestRefused, _refused)
    app.add_exception_handler(Exception, _crashed)
    return app


async def _no_such_thing(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException), "registered for it"
    what = f"{request.method} {echo(request.url.path)}"
    code = {404: "unknown_url", 405: "method_not_allowed"}.get(error.status_code, "http_error")
    answer = ApiError(error.status_code, f"{what}: {error.detail}", code)
    return JSONResponse(answer.body(), answer.http_status, headers=error.headers)


async def _refused(_request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestRefused), "registered for it"
    return JSONResponse(error.error.body(), error.error.http_status, headers=dict(error.error.headers))


async def _crashed(_request: Request, _error: Exception) -> Response:
    answer = ApiError(500, "The gateway failed; its log says why.", "internal_error")
    return JSONResponse(answer.body(), answer.http_status)


def _described(server: ServerView) -> dict[str, object]:
    if server.facts is None:
        return {"role": server.role, "address": server.address, "is_in": False}
    return {"is_in": server.is_in, **_facts(server.facts)}


def _facts(facts: ServerFacts) -> dict[str, object]:
    blocks = {
        state: getattr(facts, f"blocks_{state}") for state in ("free", "reserved", "filling", "readable", "total")
    }
    pairs = [
        {
            "peer": pair.peer_address,
            "transport": pair.transport,
            "epoch": pair.epoch,
            "state": pair.state,
            "detail": pair.detail,
            "num_blocks": pair.num_blocks,
            "num_bytes": pair.num_bytes,
        }
        for pair in facts.pairs
    ]
    kept = (
        "role",
        "address",
        "incarnation",
        "model",
        "dtype",
        "block_size",
        "num_queued",
        "num_running",
        "max_model_len",
        "transport",
    )
    return {
        **{name: getattr(facts, name) for name in kept},
        "blocks": blocks,
        "pairs": pairs,
        "counters": dict(facts.counters),
    }
