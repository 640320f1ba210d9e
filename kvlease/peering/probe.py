"""Blocks between two machines, to see that the path works: what `kvlease doctor --listen` answers and `--peer` asks.

The asking side lends a landing ring, the listening side fills it as fast as it can. Both need the cluster's secret.

Never: touches a pool, a model or a tenant.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass

import grpc.aio

from kvlease.peering.channels import credentials, make_server, open_channel
from kvlease.peering.hosting import listen
from kvlease.peering.limits import Limits
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc as rpc
from transport.contract import Landing, RingGeometry, Transport
from transport.errors import TransportError

GEOMETRY = RingGeometry(256 << 10, 16)
#: 32 MiB: a blink on hardware, seconds on an emulated device.
NUM_BLOCKS = 128
#: For the whole probe.
PROBE_S = 60.0
#: For the end of the probe before: its caller may have left a moment ago.
_TURN_S = 2.0
#: What a caller may ask for: its ring is our memory too.
_MAX_RING_BYTES = 64 << 20
_MAX_BLOCKS = 1 << 16


class ProbeFailed(Exception):
    """The path does not work; the message says where it ended."""


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What came through: every block whole and in order."""

    transport: str
    num_blocks: int
    num_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        """From the first to the last block."""
        return self.num_bytes / self.seconds


def block_bytes(number: int, num_bytes: int) -> bytes:
    """Bytes that tell which block they are of."""
    return (number.to_bytes(8, "little") * (num_bytes // 8 + 1))[:num_bytes]


class DoctorRpc(rpc.DoctorServicer):
    """One probe at a time."""

    def __init__(self, transport: Transport) -> None:
        """Probes go over `transport`."""
        self._transport = transport
        self._turn = asyncio.Lock()

    async def SendBlocks(  # noqa: N802 - the name is the protocol's
        self, request: pb.SendBlocksRequest, context: grpc.aio.ServicerContext[pb.SendBlocksRequest, pb.SendBlocksReply]
    ) -> AsyncGenerator[pb.SendBlocksReply, None]:
        """Answer the offer, then send; the end of the stream closes the channel."""
        try:
            await asyncio.wait_for(self._turn.acquire(), _TURN_S)
        except TimeoutError:
            await context.abort(grpc.StatusCode.RESOURCE_EXHAUSTED, "another probe runs")
        try:
            async with asyncio.timeout(PROBE_S), aclosing(self._send(request)) as replies:
                async for reply in replies:
                    yield reply
        finally:
            self._turn.release()

    async def _send(self, request: pb.SendBlocksRequest) -> AsyncGenerator[pb.SendBlocksReply, None]:
        """The replies of one probe."""
        try:
            geometry = _asked_geometry(request, self._transport.name)
            departure, answer = await self._transport.open_departure(geometry, request.offer)
        except (ProbeFailed, TransportError) as error:
            yield pb.SendBlocksReply(refusal=str(error))
            return
        try:
            yield pb.SendBlocksReply(answer=answer)
            await departure.ready()
            for number in range(request.num_blocks):
                slot = await departure.reserve()
                slot.memory[:] = block_bytes(number, geometry.slot_bytes)
                departure.send(slot, geometry.slot_bytes)
            # The caller ends the stream when it has all of them; until then the ring must stay.
            await asyncio.get_running_loop().create_future()
        except TransportError as error:
            yield pb.SendBlocksReply(refusal=str(error))
        finally:
            await departure.close()


async def answer_probes(transport: Transport, secret: str, host: str, port: int) -> tuple[grpc.aio.Server, str]:
    """A server that answers probes, and its address. `SystemExit` when the port cannot be had."""
    server = make_server(secret, 0, Limits())
    address = listen(server, host, port)
    rpc.add_DoctorServicer_to_server(DoctorRpc(transport), server)
    await server.start()
    return server, address


async def probe(address: str, secret: str, transport: Transport) -> ProbeResult:
    """Have `NUM_BLOCKS` blocks sent by the doctor at `address`; `ProbeFailed` says where it ended."""
    channel = open_channel(address, 0, Limits())
    landing = None
    try:
        async with asyncio.timeout(PROBE_S):
            landing = await transport.open_landing(GEOMETRY)
            request = pb.SendBlocksRequest(
                transport=transport.name,
                slot_bytes=GEOMETRY.slot_bytes,
                num_slots=GEOMETRY.num_slots,
                num_blocks=NUM_BLOCKS,
                offer=landing.offer,
            )
            call = rpc.DoctorStub(channel).SendBlocks(request, metadata=credentials(secret))
            reply = await call.read()
            if not isinstance(reply, pb.SendBlocksReply):
                raise ProbeFailed(f"{address} ended the probe without an answer")
            if reply.refusal:
                raise ProbeFailed(f"{address} refuses: {reply.refusal}")
            await landing.establish(reply.answer)
            return await _receive_all(landing, transport.name)
    except grpc.aio.AioRpcError as error:
        raise ProbeFailed(f"{address}: {error.code().name}: {error.details()}") from error
    except TransportError as error:
        raise ProbeFailed(f"blocks from {address}: {error}") from error
    except TimeoutError as error:
        raise ProbeFailed(f"{address}: not done within {PROBE_S:g} s") from error
    finally:
        if landing is not None:
            await landing.close()
        await channel.close()


async def _receive_all(landing: Landing, transport: str) -> ProbeResult:
    started = 0.0
    for number in range(NUM_BLOCKS):
        slot = await landing.receive()
        started = started or time.monotonic()
        if slot.memory != block_bytes(number, GEOMETRY.slot_bytes):
            raise ProbeFailed(f"block {number} is not the one that was sent")
        landing.release(slot)
    num_timed = NUM_BLOCKS - 1  # the clock starts when the first one is there
    return ProbeResult(transport, NUM_BLOCKS, num_timed * GEOMETRY.slot_bytes, time.monotonic() - started)


def _asked_geometry(request: pb.SendBlocksRequest, transport: str) -> RingGeometry:
    if request.transport != transport:
        raise ProbeFailed(f"this side carries blocks over {transport}, not {request.transport}")
    if request.num_blocks > _MAX_BLOCKS or request.slot_bytes * request.num_slots > _MAX_RING_BYTES:
        raise ProbeFailed(
            f"a probe of {request.num_blocks} blocks through {request.slot_bytes * request.num_slots} bytes"
        )
    try:
        return RingGeometry(request.slot_bytes, request.num_slots)
    except ValueError as error:
        raise ProbeFailed(str(error)) from error
