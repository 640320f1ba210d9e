"""What the device tests share: a geometry, limits, and frames that tell their number."""

from __future__ import annotations

import asyncio
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from transport.contract import RingGeometry
from transport.limits import Limits

GEOMETRY = RingGeometry(64 << 10, 4)
#: Deaths come late enough that a device's own report of them is seen first where it has one.
SLOW = Limits(establish_s=10.0, death_s=4.0, probe_s=0.5)
BOUND_S = 30.0
#: The guest is emulated, and its host may be busy: bounds on a death are so many times what is promised.
PATIENCE = 4.0


def fill(number: int) -> bytes:
    """The bytes of frame `number`."""
    return (number % 251 + 1).to_bytes(1, "big") * GEOMETRY.slot_bytes


@dataclass(frozen=True, slots=True)
class Peer:
    """A process with one end of a channel."""

    process: Process

    async def line(self) -> str:
        """The next line it says."""
        assert self.process.stdout is not None
        async with asyncio.timeout(BOUND_S):
            line = (await self.process.stdout.readline()).decode().strip()
        assert line, "the peer has died"
        return line

    def tell(self, line: str) -> None:
        """Say a line to it."""
        assert self.process.stdin is not None
        self.process.stdin.write(line.encode() + b"\n")

    def signal(self, number: signal.Signals) -> None:
        """Stop it, let it go on, or kill it."""
        self.process.send_signal(number)


@asynccontextmanager
async def peer(role: str) -> AsyncIterator[Peer]:
    """`landing` or `departure`, killed at the end."""
    command = (sys.executable, "-m", "tests.rdma.peer", role)
    process = await asyncio.create_subprocess_exec(*command, stdin=PIPE, stdout=PIPE)
    try:
        yield Peer(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()
