"""The other process of a measurement: a program that does what lines of JSON tell it, and the handle that its parent has on it.

    parent ──stdin:  {"do": "expect", ...}──▶ partner     the end of stdin ends it
    parent ◀─stdout: {...} or {"failed": "why"}── partner

Never: outlives its parent; the kernel closes the parent's end of the pipe.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from kvlease.bench.children import child_environ, ended
from kvlease.bench.errors import BenchFailed, PartnerFailed
from kvlease.bench.figures import Document
from kvlease.bench.limits import Limits
from kvlease.bench.transfer.receiving import Receiving
from transport.errors import TransportError

_ACTIONS = ("open", "establish", "expect", "wait", "listen", "accept", "drain", "load", "unload", "shut")


class Partner(Protocol):
    """Somebody who does what `Receiving` can do."""

    async def ask(self, action: str, **order: object) -> Document:
        """Have it done; its answer. Raises `BenchFailed`."""


class NearPartner:
    """In this process."""

    def __init__(self, receiving: Receiving) -> None:
        """Asks this one."""
        self._receiving = receiving

    async def ask(self, action: str, **order: object) -> Document:
        """Call it."""
        return await _action(self._receiving, action)(order)


class FarPartner:
    """In a process of its own."""

    def __init__(self, process: asyncio.subprocess.Process, limits: Limits) -> None:
        """Talks to this one."""
        self._process, self._limits = process, limits

    async def ask(self, action: str, **order: object) -> Document:
        """One line there, one line back."""
        assert self._process.stdin is not None and self._process.stdout is not None
        patience = self._limits.engine_s if action == "load" else self._limits.answer_s
        try:
            self._process.stdin.write(json.dumps({"do": action, **order}).encode() + b"\n")
            async with asyncio.timeout(patience):
                line = await self._process.stdout.readline()
        except TimeoutError:
            raise PartnerFailed(f"{action}: no answer within {patience:g} s") from None
        except ConnectionError as error:
            raise PartnerFailed(f"{action}: the other process has ended") from error
        if not line:
            raise PartnerFailed(f"{action}: the other process has ended")
        answer: Document = json.loads(line)
        if "failed" in answer:
            raise PartnerFailed(f"{action}: {answer['failed']}")
        return answer


@asynccontextmanager
async def partner(limits: Limits, *, is_far: bool) -> AsyncIterator[Partner]:
    """A receiving side, in a process of its own or in this one; ended at the end."""
    if not is_far:
        receiving = Receiving(limits)
        try:
            yield NearPartner(receiving)
        finally:
            await receiving.leave()
        return
    process = await asyncio.create_subprocess_exec(
        sys.executable,
        *("-P", "-m", "kvlease.bench.transfer.partner"),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env=child_environ(),
        limit=limits.max_line_bytes,
    )
    try:
        yield FarPartner(process, limits)
    finally:
        assert process.stdin is not None
        process.stdin.close()  # it reads until the end
        await ended(process, limits.leave_s)


async def serve_partner() -> None:
    """Answer lines of stdin until it ends."""
    limits = Limits()
    reader = asyncio.StreamReader(limit=limits.max_line_bytes)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin.buffer)
    receiving = Receiving(limits)
    try:
        while line := await reader.readline():
            order: Document = json.loads(line)
            answer = await _answered(_action(receiving, str(order.pop("do"))), order)
            sys.stdout.write(json.dumps(answer) + "\n")
            sys.stdout.flush()
    finally:
        await receiving.leave()


async def _answered(action: Callable[[Document], Awaitable[Document]], order: Document) -> Document:
    try:
        return await action(order)
    except (BenchFailed, TransportError, OSError, ValueError) as error:
        return {"failed": f"{type(error).__name__}: {error}"}


def _action(receiving: Receiving, name: str) -> Callable[[Document], Awaitable[Document]]:
    assert name in _ACTIONS, name
    action: Callable[[Document], Awaitable[Document]] = getattr(receiving, name)
    return action


if __name__ == "__main__":
    asyncio.run(serve_partner())
