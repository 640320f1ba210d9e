"""prefill's gRPC edge: decodes messages, calls the service, encodes what comes back.

Never: holds logic of an attempt.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvlease.handoff.messages import AttemptDown, AttemptUp
from kvlease.handoff.wire import WireError, decode_up, encode_down
from kvlease.peering.incoming import IncomingPairs
from kvlease.peering.status import ServerReport, encode_report
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc as rpc
from prefill_server.service import PrefillService


class PrefillRpc(rpc.PrefillServicer):
    """The methods of the Prefill service."""

    def __init__(self, service: PrefillService, pairs: IncomingPairs, report: Callable[[], ServerReport]) -> None:
        """`report` says how the server is."""
        self._service, self._pairs, self._report = service, pairs, report

    async def Pair(  # type: ignore[override]  # noqa: N802 - the protocol's name; a coroutine that writes
        self, request_iterator: AsyncIterator[pb.PairUp], context: grpc.aio.ServicerContext[pb.PairUp, pb.PairDown]
    ) -> None:
        """The life of a pair."""
        await self._pairs.serve(aiter(request_iterator), context)

    async def Attempt(  # type: ignore[override]  # noqa: N802 - the protocol's name; a coroutine that writes
        self,
        request_iterator: AsyncIterator[pb.AttemptUp],
        context: grpc.aio.ServicerContext[pb.AttemptUp, pb.AttemptDown],
    ) -> None:
        """The life of an attempt."""

        async def send(message: AttemptDown) -> None:
            await context.write(encode_down(message))

        await self._service.serve(_decoded(request_iterator), send)

    async def Status(  # noqa: N802 - the protocol's name
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[pb.StatusRequest, pb.ServerStatus]
    ) -> pb.ServerStatus:
        """How the server is."""
        return encode_report(self._report())


async def _decoded(stream: AsyncIterator[pb.AttemptUp]) -> AsyncIterator[AttemptUp]:
    try:
        async for message in stream:
            yield decode_up(message)
    except DecodeError as error:
        raise WireError(f"AttemptUp: {error}") from error
