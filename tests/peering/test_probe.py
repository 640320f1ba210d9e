"""The probe of `kvlease doctor` over real sockets: blocks come whole, and nobody gets any without the secret."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from kvlease.peering.channels import credentials, open_channel
from kvlease.peering.limits import Limits
from kvlease.peering.probe import GEOMETRY, NUM_BLOCKS, ProbeFailed, ProbeResult, answer_probes, probe
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc as rpc
from transport.contract import RingGeometry
from transport.memory import MemoryHub, MemoryTransport
from transport.tcp.transport import TcpTransport

SECRET = "a secret of the tests"


@asynccontextmanager
async def listening() -> AsyncIterator[str]:
    """A doctor that listens; its address."""
    transport = TcpTransport(SECRET)
    server, address = await answer_probes(transport, SECRET, "127.0.0.1", 0)
    try:
        yield address
    finally:
        await server.stop(0)
        await transport.close()


async def ask(address: str, secret: str = SECRET) -> ProbeResult:
    transport = TcpTransport(SECRET)
    try:
        return await probe(address, secret, transport)
    finally:
        await transport.close()


async def refusal(address: str, **fields: object) -> str:
    """What the doctor says to a request of this kind."""
    request = {"transport": "tcp", "slot_bytes": 64, "num_slots": 4, "num_blocks": 1, "offer": b"", **fields}
    async with open_channel(address, 0, Limits()) as channel:
        call = rpc.DoctorStub(channel).SendBlocks(pb.SendBlocksRequest(**request), metadata=credentials(SECRET))  # type: ignore[arg-type]
        reply = await call.read()
        assert isinstance(reply, pb.SendBlocksReply)
        return reply.refusal


def test_all_blocks_come_whole_and_in_order_again_and_again() -> None:
    async def test() -> None:
        async with listening() as address:
            for _ in range(3):
                result = await ask(address)
                assert (result.transport, result.num_blocks) == ("tcp", NUM_BLOCKS)
                assert result.num_bytes == (NUM_BLOCKS - 1) * GEOMETRY.slot_bytes
                assert result.bytes_per_s > 0

    asyncio.run(test())


def test_without_the_secret_there_is_no_block() -> None:
    async def test() -> None:
        async with listening() as address:
            with pytest.raises(ProbeFailed, match="UNAUTHENTICATED"):
                await ask(address, "a guess")

    asyncio.run(test())


def test_nobody_there_is_said() -> None:
    with pytest.raises(ProbeFailed, match="UNAVAILABLE"):
        asyncio.run(ask("127.0.0.1:1"))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"transport": "rdma"}, "carries blocks over tcp, not rdma"),
        ({"slot_bytes": 1 << 20, "num_slots": 1 << 10}, "a probe of"),
        ({"num_blocks": 1 << 20}, "a probe of"),
        ({"slot_bytes": 63}, "multiple of 64"),
        ({"offer": b"x"}, "tcp offer"),
    ],
)
def test_a_request_out_of_bounds_is_refused(fields: dict[str, object], reason: str) -> None:
    async def test() -> None:
        async with listening() as address:
            assert reason in await refusal(address, **fields)

    asyncio.run(test())


def test_one_probe_runs_at_a_time_and_its_end_makes_room() -> None:
    async def test() -> None:
        async with listening() as address, open_channel(address, 0, Limits()) as channel:
            landing = await TcpTransport(SECRET).open_landing(RingGeometry(64, 4))
            request = pb.SendBlocksRequest(
                transport="tcp", slot_bytes=64, num_slots=4, num_blocks=1, offer=landing.offer
            )
            call = rpc.DoctorStub(channel).SendBlocks(request, metadata=credentials(SECRET))
            assert isinstance(await call.read(), pb.SendBlocksReply)
            with pytest.raises(ProbeFailed, match="another probe runs"):
                await ask(address)
            call.cancel()
            async with asyncio.timeout(10):
                while not await _succeeds(address):
                    pass
            await landing.close()

    asyncio.run(test())


async def _succeeds(address: str) -> bool:
    try:
        await ask(address)
    except ProbeFailed:
        return False
    return True


def test_a_transport_that_cannot_be_had_is_said() -> None:
    async def test() -> None:
        async with listening() as address:
            transport = MemoryTransport(MemoryHub())
            with pytest.raises(ProbeFailed, match="carries blocks over tcp, not memory"):
                await probe(address, SECRET, transport)
            await transport.close()

    asyncio.run(test())
