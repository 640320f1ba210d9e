"""One HTTP request and the events of its answer, on a connection of its own.

A small client of our own: the time at which bytes arrive is what is measured, and nothing may stand between them and the clock.

Never: follows a redirect, uses a proxy, or reads more than a bounded answer.
"""

from __future__ import annotations

import asyncio
import json
import ssl
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import httptools

from kvlease.bench.errors import BenchFailed
from kvlease.bench.serve.limits import Limits

_PORTS = {"http": 80, "https": 443}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a server is: its URL, with or without a path such as `/v1`, and the key that it wants."""

    url: SplitResult
    api_key: str = ""

    @classmethod
    def of(cls, url: str, api_key: str = "") -> Endpoint:
        """Raises `BenchFailed` for what is no URL."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise BenchFailed(f"{url!r} is no http:// or https:// URL")
        return cls(parts, api_key)

    @property
    def base(self) -> str:
        """The path before `/completions`."""
        return self.url.path.rstrip("/") or "/v1"

    def head(self, method: str, path: str, num_bytes: int) -> bytes:
        """The head of a request with a body of so many bytes of JSON."""
        lines = [
            f"{method} {self.base}{path} HTTP/1.1",
            f"Host: {self.url.netloc.rpartition('@')[2]}",
            "Connection: close",
            "Accept: text/event-stream, application/json",
            f"Content-Length: {num_bytes}",
            "Content-Type: application/json",
        ]
        if self.api_key:
            lines.append(f"Authorization: Bearer {self.api_key}")
        return ("\r\n".join(lines) + "\r\n\r\n").encode()


class AnswerBytes:
    """Takes an answer's bytes as they come; gives status, body parts and the end. For `httptools`."""

    def __init__(self) -> None:
        """Nothing came."""
        self._parser = httptools.HttpResponseParser(self)
        self.parts: deque[bytes] = deque()
        self.is_complete = False

    @property
    def status(self) -> int:
        """The HTTP status; 0 before it came."""
        return int(self._parser.get_status_code())

    def feed(self, data: bytes) -> None:
        """More bytes; raises `BenchFailed` if they are no HTTP."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BenchFailed(f"the answer is no HTTP: {error}") from error

    def on_body(self, body: bytes) -> None:
        """Part of the body, without the chunks around it."""
        self.parts.append(body)

    def on_message_complete(self) -> None:
        """The end."""
        self.is_complete = True


class EventLines:
    """Server-sent events out of the body's parts: the data of each whole event."""

    def __init__(self) -> None:
        """Nothing came."""
        self._rest = b""

    def feed(self, part: bytes) -> list[bytes]:
        """The events that this part completes."""
        *whole, self._rest = (self._rest + part).replace(b"\r\n", b"\n").split(b"\n\n")
        return [data for event in whole if (data := _data(event))]


def _data(event: bytes) -> bytes:
    lines = [line[5:].strip() for line in event.split(b"\n") if line.startswith(b"data:")]
    return b"\n".join(lines)


class Exchange:
    """An open connection with a request on its way. `status` is known once `begun`."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, limits: Limits) -> None:
        """Takes the streams over."""
        self._reader, self._writer, self._limits = reader, writer, limits
        self._answer = AnswerBytes()
        self._num_bytes = 0

    @classmethod
    async def open(cls, endpoint: Endpoint, method: str, path: str, body: object, limits: Limits) -> Exchange:
        """Connect and send. Raises `OSError`."""
        url = endpoint.url
        context = ssl.create_default_context() if url.scheme == "https" else None
        host, port = url.hostname, url.port or _PORTS[url.scheme]
        reader, writer = await asyncio.open_connection(host, port, ssl=context)
        data = b"" if body is None else json.dumps(body).encode()
        writer.write(endpoint.head(method, path, len(data)) + data)
        return cls(reader, writer, limits)

    async def begun(self) -> int:
        """The status, once the first byte of the body or the end is here."""
        while not self._answer.parts and not self._answer.is_complete:
            if not await self._more():
                break
        return self._answer.status

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises `BenchFailed` when the connection ends before the answer does."""
        while True:
            while self._answer.parts:
                yield self._answer.parts.popleft()
            if self._answer.is_complete:
                return
            if not await self._more():
                raise BenchFailed("the connection ended in the middle of the answer")

    async def body(self) -> bytes:
        """All of it."""
        return b"".join([part async for part in self.parts()])

    def close(self) -> None:
        """End the connection, whatever is still on its way."""
        self._writer.close()

    async def _more(self) -> bool:
        data = await self._reader.read(self._limits.read_bytes)
        self._num_bytes += len(data)
        if self._num_bytes > self._limits.max_answer_bytes:
            raise BenchFailed(f"the answer is longer than {self._limits.max_answer_bytes} bytes")
        if data:
            self._answer.feed(data)
        return bool(data)
