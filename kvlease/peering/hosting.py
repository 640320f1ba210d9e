"""What both servers do around their work: listen, say so, wait for the signal, drain, stop.

Never: builds a server's parts; each composition root does.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable

import grpc.aio

from kvlease.peering.limits import Limits


def listen(server: grpc.aio.Server, host: str, port: int) -> str:
    """Bind; returns the address. `SystemExit` with one line when it cannot be had."""
    try:
        bound = server.add_insecure_port(f"{host}:{port}")
    except RuntimeError:
        bound = 0
    if not bound:
        raise SystemExit(f"{host}:{port} cannot be listened on: another process has it, choose another --port")
    return f"{host}:{bound}"


async def serve_until_signal(server: grpc.aio.Server, drain: Callable[[], None], limits: Limits) -> None:
    """Until SIGTERM or SIGINT: then nothing new is let in, what runs may end, and the server stops."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    try:
        await stop.wait()
        drain()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
        await server.stop(limits.drain_s)
