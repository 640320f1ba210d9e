"""Writing an answer: whole, or as server-sent events, with exactly one end.

Never: sends a second end, or a success after an error.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from enum import Enum, auto

from starlette.types import Send

from gateway.openai_errors import ApiError

#: Line breaks that some readers of event streams honour; JSON leaves them as they are.
_LINE_BREAKS = str.maketrans({"\u0085": "\\u0085", "\u2028": "\\u2028", "\u2029": "\\u2029"})
_JSON = ("content-type", "application/json")
_EVENTS = (
    ("content-type", "text/event-stream; charset=utf-8"),
    ("cache-control", "no-cache"),
    ("x-accel-buffering", "no"),
)
_DONE = b"data: [DONE]\n\n"

Headers = Iterable[tuple[str, str]]


class _State(Enum):
    WAITING = auto()  # no head yet: an error can still have a status of its own
    STREAMING = auto()
    ENDED = auto()


class Reply:
    """One response on its way out. Raises OSError when the server below says that the client is gone."""

    def __init__(self, send: Send, request_id: str) -> None:
        """Nothing is sent yet."""
        self._send = send
        self._request_id = request_id
        self._state = _State.WAITING
        self.http_status = 0

    @property
    def has_ended(self) -> bool:
        """Whether the last byte went out."""
        return self._state is _State.ENDED

    async def whole(self, body: Mapping[str, object]) -> None:
        """A complete answer."""
        await self._all_at_once(200, body, ())

    async def open_stream(self) -> None:
        """The head of an event stream: from here on, the status is 200 whatever comes."""
        assert self._state is _State.WAITING, "the head is already out"
        self._state = _State.STREAMING
        await self._head(200, _EVENTS)

    async def event(self, body: Mapping[str, object]) -> None:
        """One event of a stream."""
        assert self._state is _State.STREAMING, "events belong between head and end"
        await self._send_bytes(b"data: " + _encoded(body) + b"\n\n", True)

    async def done(self) -> None:
        """The good end of a stream."""
        assert self._state is _State.STREAMING, "only a stream has this end"
        self._state = _State.ENDED
        await self._send_bytes(_DONE, False)

    async def fail(self, error: ApiError) -> None:
        """The bad end, by whatever way is still open; nothing when there was an end already."""
        if self._state is _State.WAITING:
            await self._all_at_once(error.http_status, error.body(), error.headers)
        elif self._state is _State.STREAMING:
            self._state = _State.ENDED
            await self._send_bytes(b"event: error\ndata: " + _encoded(error.body()) + b"\n\n", False)

    async def _all_at_once(self, status: int, body: Mapping[str, object], headers: Headers) -> None:
        assert self._state is _State.WAITING, "the head is already out"
        self._state = _State.ENDED
        data = _encoded(body)
        await self._head(status, (_JSON, ("content-length", str(len(data))), *headers))
        await self._send_bytes(data, False)

    async def _head(self, status: int, headers: Headers) -> None:
        self.http_status = status
        fields = (*headers, ("x-request-id", self._request_id))
        raw = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in fields]
        await self._send({"type": "http.response.start", "status": status, "headers": raw})

    async def _send_bytes(self, data: bytes, has_more: bool) -> None:
        await self._send({"type": "http.response.body", "body": data, "more_body": has_more})


def _encoded(body: Mapping[str, object]) -> bytes:
    return json.dumps(body, ensure_ascii=False, separators=(",", ":")).translate(_LINE_BREAKS).encode()
