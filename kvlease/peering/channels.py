"""gRPC channels and servers of the cluster: message limits, keepalive, and the cluster's secret on every call.

Never: lets a call without the secret reach a handler.
"""

from __future__ import annotations

import hmac
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from kvlease.peering.limits import Limits

_SECRET_KEY = "kvlease-secret"  # noqa: S105 - the name of a header, not a secret
# Requests and replies of every method pass here, so there is no narrower type.
if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    _Handler = grpc.RpcMethodHandler[Any, Any]
    _Continuation = Callable[[grpc.HandlerCallDetails], Awaitable[_Handler | None]]
    _Context = grpc.aio.ServicerContext[Any, Any]
_Options = Sequence[tuple[str, int]]


def credentials(secret: str) -> tuple[tuple[str, str], ...]:
    """The metadata that every call carries."""
    return ((_SECRET_KEY, secret),)


def _options(context_length: int, limits: Limits) -> _Options:
    num_bytes = limits.message_bytes + limits.token_id_bytes * context_length
    return (
        ("grpc.max_receive_message_length", num_bytes),
        ("grpc.max_send_message_length", num_bytes),
        ("grpc.keepalive_time_ms", int(limits.keepalive_s * 1000)),
        ("grpc.keepalive_timeout_ms", int(limits.keepalive_timeout_s * 1000)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.http2.min_ping_interval_without_data_ms", int(limits.keepalive_s * 500)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(limits.keepalive_s * 500)),
        # A restarted peer is looked for within the pair's own back-off, not gRPC's.
        ("grpc.initial_reconnect_backoff_ms", int(limits.backoff_s * 1000)),
        ("grpc.max_reconnect_backoff_ms", int(limits.max_backoff_s * 1000)),
        # A container comes back at another address: its name is looked up again at each try, not every 30 s, and a try
        # that nobody answers, not even with a refusal, ends within the time that a pair gets, not within 20 s.
        ("grpc.dns_min_time_between_resolutions_ms", int(limits.backoff_s * 1000)),
        ("grpc.min_reconnect_backoff_ms", int(limits.connect_s * 1000)),
        ("grpc.so_reuseport", 0),
        ("grpc.use_local_subchannel_pool", 1),
    )


def open_channel(address: str, context_length: int, limits: Limits) -> grpc.aio.Channel:
    """A channel to a server of the cluster; connects when it is first used."""
    return grpc.aio.insecure_channel(address, options=_options(context_length, limits))


def make_server(secret: str, context_length: int, limits: Limits) -> grpc.aio.Server:
    """A server whose every method asks for the secret, and which answers RESOURCE_EXHAUSTED beyond `max_calls`."""
    return grpc.aio.server(
        interceptors=(SecretGate(secret),),
        options=_options(context_length, limits),
        maximum_concurrent_rpcs=limits.max_calls,
    )


class SecretGate(grpc.aio.ServerInterceptor):
    """Answers UNAUTHENTICATED before any handler runs, unless the caller knows the secret."""

    def __init__(self, secret: str) -> None:
        """`secret` must not be empty: an empty one would be known to everybody."""
        assert secret, "a cluster without a secret"
        self._secret = secret.encode()

    async def intercept_service(
        self, continuation: _Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> _Handler | None:
        """Compare in constant time."""
        given = dict(handler_call_details.invocation_metadata or ()).get(_SECRET_KEY, "")
        known = hmac.compare_digest(given.encode() if isinstance(given, str) else given, self._secret)
        handler = await continuation(handler_call_details)
        return handler if known or handler is None else _closed(handler)


def _closed(handler: _Handler) -> _Handler:
    """The same kind of method, which refuses."""

    async def refuse(_request: object, context: _Context) -> None:
        await context.abort(grpc.StatusCode.UNAUTHENTICATED, "the cluster's secret is missing or wrong")

    if handler.request_streaming and handler.response_streaming:
        return grpc.stream_stream_rpc_method_handler(refuse)
    if handler.response_streaming:
        return grpc.unary_stream_rpc_method_handler(refuse)
    return grpc.unary_unary_rpc_method_handler(refuse)
