"""The gateway's gRPC edge: the clients of decode and prefill servers.

Never: raises for a server's trouble; a lost server is an event or a missing answer.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator

import grpc
import grpc.aio

from gateway.cluster import DECODE, PREFILL, PairFacts, ServerFacts
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Finished,
    GenerationEvent,
    GenerationRequest,
    Rejected,
)
from kvlease.handoff.verdicts import aborted
from kvlease.handoff.wire import WireError, decode_event, encode_request
from kvlease.peering.channels import credentials, open_channel
from kvlease.peering.limits import Limits
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc as rpc


class GrpcStatusClient:
    """One server, asked how it is."""

    def __init__(self, role: str, address: str, secret: str, context_length: int) -> None:
        """Connects with the first call."""
        assert role in (DECODE, PREFILL), role
        self.address = address
        self._credentials = credentials(secret)
        self._channel = open_channel(address, context_length, Limits())
        stub = rpc.DecodeStub if role == DECODE else rpc.PrefillStub
        self._status = stub(self._channel).Status

    async def status(self) -> ServerFacts | None:
        """None: unreachable."""
        try:
            status: pb.ServerStatus | None = await self._status(pb.StatusRequest(), metadata=self._credentials)
        except grpc.aio.AioRpcError:
            return None
        return None if status is None else _facts(status)  # gRPC gives None for bytes that are no message

    async def close(self) -> None:
        """Close the channel."""
        await self._channel.close()


class GrpcDecodeClient:
    """One decode server."""

    def __init__(self, address: str, secret: str, context_length: int) -> None:
        """Connects with the first call."""
        self.address = address
        self._credentials = credentials(secret)
        self._status = GrpcStatusClient(DECODE, address, secret, context_length)
        self._channel = open_channel(address, context_length, Limits())
        self._generate = rpc.DecodeStub(self._channel).Generate

    async def status(self) -> ServerFacts | None:
        """None: unreachable."""
        return await self._status.status()

    async def close(self) -> None:
        """Close the channels."""
        await self._status.close()
        await self._channel.close()

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one request, the last of them terminal. Closing the iterator cancels it everywhere."""
        call = self._generate(encode_request(request), metadata=self._credentials)
        try:
            async for message in call:
                event = decode_event(message)
                yield event
                if isinstance(event, Finished | Rejected | Aborted):
                    return
            yield aborted(AbortReason.PEER_LOST, f"decode {self.address} ended the stream without an end")
        except grpc.aio.AioRpcError as error:
            yield aborted(AbortReason.PEER_LOST, f"decode {self.address}: {error.code().name}: {error.details()}")
        except WireError as error:
            yield aborted(AbortReason.PROTOCOL_ERROR, str(error))
        finally:
            call.cancel()


def _facts(status: pb.ServerStatus) -> ServerFacts:
    pairs = tuple(
        PairFacts(p.peer_address, p.transport, p.epoch, p.state, p.detail, p.num_blocks, p.num_bytes)
        for p in status.pairs
    )
    return ServerFacts(
        role=status.role,
        address=status.address,
        incarnation=status.incarnation.hex(),
        model=status.model,
        dtype=status.dtype,
        block_size=status.block_size,
        blocks_free=status.blocks_free,
        blocks_reserved=status.blocks_reserved,
        blocks_filling=status.blocks_filling,
        blocks_readable=status.blocks_readable,
        blocks_total=status.blocks_total,
        num_queued=status.num_queued,
        num_running=status.num_running,
        max_model_len=status.max_model_len,
        pairs=pairs,
        counters=dict(status.counters),
        transport=status.transport,
    )
