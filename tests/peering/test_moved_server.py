"""A server that comes back under its name at another address, as a container does, is found there soon."""

from __future__ import annotations

import asyncio
import socket
import struct
from typing import cast

import grpc
import grpc.aio

from kvlease.peering.channels import make_server, open_channel
from kvlease.peering.limits import Limits

NAME = "prefill-0.test"
SOON_S = 8.0  # gRPC itself would look a name up again after 30 s at the earliest


class Names(asyncio.DatagramProtocol):
    """A name server that knows one name: its A record is `address`."""

    def __init__(self) -> None:
        self.address = "127.0.0.1"
        self._transport: asyncio.DatagramTransport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.DatagramTransport", transport)

    def datagram_received(self, data: bytes, addr: tuple[str, int]) -> None:
        end = data.index(b"\0", 12) + 5  # of the question: name, type, class
        question, is_a = data[12:end], data[end - 4 : end - 2] == b"\0\1"
        record = b"\xc0\x0c" + struct.pack("!HHIH", 1, 1, 0, 4) + socket.inet_aton(self.address)
        head = data[:2] + struct.pack("!HHHHH", 0x8180, 1, int(is_a), 0, 0)
        assert self._transport is not None
        self._transport.sendto(head + question + (record if is_a else b""), addr)


async def _serve(address: str, port: int) -> tuple[grpc.aio.Server, int]:
    server = make_server("a secret", 100, Limits())
    bound = server.add_insecure_port(f"{address}:{port}")
    await server.start()
    return server, bound


async def _is_up(channel: grpc.aio.Channel) -> bool:
    """Whether some server answers, be it that it knows no such method."""
    try:
        await channel.unary_unary("/nothing/Here")(b"", timeout=1)  # type: ignore[arg-type]  # bytes, as they are
    except grpc.aio.AioRpcError as error:
        return error.code() is grpc.StatusCode.UNIMPLEMENTED
    return True


def test_a_server_is_found_at_its_new_address() -> None:
    async def test() -> None:
        loop = asyncio.get_running_loop()
        transport, names = await loop.create_datagram_endpoint(Names, local_addr=("127.0.0.1", 0))
        first, port = await _serve("127.0.0.1", 0)
        dns = transport.get_extra_info("sockname")[1]
        channel = open_channel(f"dns://127.0.0.1:{dns}/{NAME}:{port}", 100, Limits())
        assert await _is_up(channel)
        await first.stop(0)
        assert not await _is_up(channel)
        names.address = "127.0.0.2"
        second, _ = await _serve("127.0.0.2", port)
        async with asyncio.timeout(SOON_S):
            while not await _is_up(channel):  # noqa: ASYNC110  the other side decides
                await asyncio.sleep(0.05)
        await channel.close()
        await second.stop(0)
        transport.close()

    asyncio.run(test())
