"""What both servers do around their work: listen, say so, wait for the signal, drain, stop.

Never: builds a server's parts; each composition root does.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator, Sequence
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


def advertised(address: str, host: str) -> str:
    """`address` as peers know it: its port at `host`, or unchanged where `host` is empty."""
    if not host:
        return address
    port = address.rpartition(":")[2]
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


async def until_signal(work: Sequence[asyncio.Task[None]] = ()) -> None:
    """Until SIGTERM or SIGINT, or until a task of `work` ends, which it never should: then its error ends the server.

    A server that listens but whose loop is gone would take requests and let them wait for their deadline.
    """
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    numbers = (signal.SIGTERM, signal.SIGINT)
    for number in numbers:
        loop.add_signal_handler(number, stop.set)
    try:
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait([stopping, *work], return_when=asyncio.FIRST_COMPLETED)
        for task in work:
            if task.done():
                task.result()
                raise RuntimeError(f"{task.get_name()} ended by itself")
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)


async def ended(task: asyncio.Task[None]) -> None:
    """Cancel the task and wait for its end; how it ended before is not said again."""
    task.cancel()
    await asyncio.wait([task])


@asynccontextmanager
async def aclosing_transport(transport: Transport) -> AsyncIterator[Transport]:
    """The transport, closed at the end: after the channels that were made by it."""
    try:
        yield transport
    finally:
        await transport.close()
