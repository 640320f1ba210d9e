"""HTTP by hand, for what a well-behaved client cannot be made to send.

Never: parses more of an answer than a test looks at.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import Any

WITHIN_S = 5.0


@dataclass(frozen=True)
class Answer:
    """A whole answer; the server closed the connection, or said how long the body is."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


@dataclass(frozen=True)
class Wire:
    """One connection."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        with suppress(ConnectionError):
            await self.writer.drain()

    async def send_head(self, path: str = "/v1/completions", method: str = "POST", **headers: str) -> None:
        fields = {"host": "test", "content-type": "application/json"}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"{method} {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items() if value)]
        await self.send("\r\n".join(lines).encode() + b"\r\n\r\n")

    async def post(self, body: Mapping[str, object], path: str = "/v1/completions") -> None:
        data = json.dumps(body).encode()
        await self.send_head(path, content_length=str(len(data)))
        await self.send(data)

    async def answer(self) -> Answer:
        async with asyncio.timeout(WITHIN_S):
            head = await self.reader.readuntil(b"\r\n\r\n")
            first, *lines = head.decode().strip().split("\r\n")
            headers = {name.lower(): value for name, value in (line.split(": ", 1) for line in lines)}
            body = await self.reader.readexactly(int(headers.get("content-length", "0")))
        return Answer(int(first.split()[1]), headers, body)

    async def line(self) -> bytes:
        async with asyncio.timeout(WITHIN_S):
            return await self.reader.readline()

    def leave(self) -> None:
        """Gone, without a word: what was not read makes it a reset."""
        self.writer.transport.abort()


@asynccontextmanager
async def connected(port: int) -> AsyncGenerator[Wire, None]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield Wire(reader, writer)
    finally:
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()
