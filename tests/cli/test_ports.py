from __future__ import annotations

import asyncio
from contextlib import closing

import grpc
import pytest

from kvlease.cli.errors import ConfigurationError
from kvlease.cli.ports import reserve_port


def test_a_reserved_port_can_be_listened_on_again_and_again_by_our_servers_only() -> None:
    with closing(reserve_port("127.0.0.1", 0)) as reservation:
        port = reservation.getsockname()[1]
        for _ in range(2):
            assert asyncio.run(listen_once(port)) == port
        with pytest.raises(OSError, match="in use"):
            asyncio.run(listen_without_reuse(port))


async def listen_once(port: int) -> int:
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    bound = server.add_insecure_port(f"127.0.0.1:{port}")
    await server.start()
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.close()
    with pytest.raises(ConfigurationError, match=f"--port {port}: .* in use"):
        reserve_port("127.0.0.1", port)
    await server.stop(None)
    return bound


async def listen_without_reuse(port: int) -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), "127.0.0.1", port, reuse_address=False)
    server.close()


def test_a_host_that_is_not_ours_is_refused() -> None:
    with pytest.raises(ConfigurationError, match=r"192\.0\.2\.1"):
        reserve_port("192.0.2.1", 8000)
    with pytest.raises(ConfigurationError, match=r"no-such-host\.invalid"):
        reserve_port("no-such-host.invalid", 8000)
