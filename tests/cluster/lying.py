"""A prefill server's double in front of a real one: it passes everything on but the truth about an attempt.

Never: touches a block; those go from the real server to decode directly.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import TYPE_CHECKING, Any

import grpc.aio

from kvlease.peering.channels import credentials, make_server, open_channel
from kvlease.peering.limits import Limits
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc as rpc
from tests.cluster.harness import SECRET

if TYPE_CHECKING:  # grpc's classes are generic in their stubs only
    Context = grpc.aio.ServicerContext[Any, Any]
    Call = grpc.aio.StreamStreamCall[Any, Any]
#: An attempt as the double plays it: decode's messages, and how to answer.
Play = Callable[[AsyncIterator[pb.AttemptUp], Callable[[pb.AttemptDown], Awaitable[None]]], Awaitable[None]]
#: What becomes of a message on its way down.
Spoil = Callable[[pb.AttemptDown], pb.AttemptDown]


class LyingPrefill(rpc.PrefillServicer):
    """Relays pairs; relays attempts through `spoil`, or plays them itself."""

    def __init__(self, channel: grpc.aio.Channel, spoil: Spoil, play: Play | None) -> None:
        self._stub, self._spoil, self._play = rpc.PrefillStub(channel), spoil, play

    async def Pair(self, request_iterator: AsyncIterator[pb.PairUp], context: Context) -> None:  # type: ignore[override]  # noqa: N802
        await _relay(self._stub.Pair(metadata=credentials(SECRET)), request_iterator, context, lambda message: message)

    async def Attempt(self, request_iterator: AsyncIterator[pb.AttemptUp], context: Context) -> None:  # type: ignore[override]  # noqa: N802
        if self._play is not None:
            await self._play(aiter(request_iterator), context.write)
            return
        await _relay(self._stub.Attempt(metadata=credentials(SECRET)), request_iterator, context, self._spoil)

    async def Status(self, request: pb.StatusRequest, context: Context) -> pb.ServerStatus:  # noqa: N802
        return await self._stub.Status(request, metadata=credentials(SECRET))


async def _relay(call: Call, up: AsyncIterator[Any], context: Context, spoil: Callable[[Any], Any]) -> None:
    async def climb() -> None:
        async for message in up:
            await call.write(message)

    climbing = asyncio.create_task(climb())
    try:
        async for message in call:
            await context.write(spoil(message))
    finally:
        climbing.cancel()
        call.cancel()


def lying(
    spoil: Spoil = lambda message: message, play: Play | None = None
) -> Callable[[str], AbstractAsyncContextManager[str]]:
    """For `Shape.in_front`."""

    @asynccontextmanager
    async def serve(address: str) -> AsyncIterator[str]:
        channel = open_channel(address, 4096, Limits())
        server = make_server(SECRET, 4096, Limits())
        rpc.add_PrefillServicer_to_server(LyingPrefill(channel, spoil, play), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            await server.stop(0)
            await channel.close()

    return serve
