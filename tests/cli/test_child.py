from __future__ import annotations

import asyncio
import errno
from contextlib import closing

import grpc
import pytest

from kvlease.cli.child import run_to_exit
from kvlease.cli.errors import ConfigurationError
from kvlease.cli.serve import reserve_port


class Refusing(Exception):
    exit_code = 2


async def failing(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (SystemExit("port 1:\n taken"), 2, "port 1: taken"),
        (Refusing("no\nmodel"), 2, "no model"),
        (ExceptionGroup("tasks", [ValueError("a"), ExceptionGroup("inner", [Refusing("no model")])]), 2, "no model"),
        (OSError(errno.EADDRINUSE, "Address already in use"), 2, "[Errno 98] Address already in use"),
    ],
)
def test_a_refusal_is_one_line_and_its_exit_code(error: BaseException, exit_code: int, line: str) -> None:
    lines: list[str] = []
    assert run_to_exit(failing(error), lines.append) == exit_code
    assert lines == [line]


@pytest.mark.parametrize("error", [ValueError("a fault"), OSError(errno.EIO, "I/O"), ExceptionGroup("g", [KeyError()])])
def test_a_fault_is_no_refusal_and_leaves_its_traceback(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    assert run_to_exit(failing(error), lines.append) == 1
    assert lines == []
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(("code", "exit_code"), [(None, 0), (0, 0), (7, 7)])
def test_an_exit_code_is_passed_through(code: int | None, exit_code: int) -> None:
    assert run_to_exit(failing(SystemExit(code)), pytest.fail) == exit_code


def test_the_end_of_a_server_is_a_clean_exit() -> None:
    assert run_to_exit(asyncio.sleep(0), pytest.fail) == 0


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
