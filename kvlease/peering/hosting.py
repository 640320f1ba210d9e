"""What both servers do around their work: listen, say so, wait for the signal, drain, stop.

Never: builds a server's parts; each composition root does.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc.aio

from transport.contract import Transport


def listen(server: grpc.aio.Server, host: str, port: int) -> str:
    """Bind; returns the address. `SystemExit` with one line when it cannot be had."""
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        bound = 0
    if not bound:
        raise SystemExit(f"{host}:{port} cannot be listened on: another process has it, choose another --port")
    return f"{host}:{bound}"


async def until_signal() -> None:
    """Until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


@asynccontextmanager
async def aclosing_transport(transport: Transport) -> AsyncIterator[Transport]:
    """The transport, closed at the end: after the channels that were made by it."""
    try:
        yield transport
    finally:
        await transport.close()
