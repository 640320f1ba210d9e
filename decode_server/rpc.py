"""decode's gRPC edge: decodes a message, calls the service, encodes what comes back.

Never: holds logic of a request.
"""

from __future__ import annotations

from collections.abc import Callable

import grpc
import grpc.aio

from decode_server.service import DecodeService
from kvlease.handoff.messages import GenerationEvent, RejectReason
from kvlease.handoff.verdicts import rejected
from kvlease.handoff.wire import WireError, decode_request, encode_event
from kvlease.peering.status import ServerReport, encode_report
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc as rpc


class DecodeRpc(rpc.DecodeServicer):
    """The methods of the Decode service."""

    def __init__(self, service: DecodeService, report: Callable[[], ServerReport]) -> None:
        """`report` says how the server is."""
        self._service, self._report = service, report

    async def Generate(  # type: ignore[override]  # noqa: N802 - the protocol's name; a coroutine that writes
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateEvent]
    ) -> None:
        """One request. The caller's cancel, or its end, cancels this task and with it everything."""

        async def emit(event: GenerationEvent) -> None:
            await context.write(encode_event(event))

        try:
            decoded = decode_request(request)
        except WireError as error:
            await emit(rejected(RejectReason.INVALID_REQUEST, str(error)))
            return
        await self._service.serve(decoded, emit)

    async def Status(  # noqa: N802 - the protocol's name
        self, request: pb.StatusRequest, context: grpc.aio.ServicerContext[pb.StatusRequest, pb.ServerStatus]
    ) -> pb.ServerStatus:
        """How the server is."""
        return encode_report(self._report())
