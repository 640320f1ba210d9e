"""Reading a request's body within bounds: its own size, the size of all held at once, and time.

Never: trusts a content-length, or holds more of a body than is allowed.
"""

from __future__ import annotations

import asyncio
from email.message import Message

from starlette.requests import Request

from gateway.errors import RequestRefused
from gateway.limits import Limits
from gateway.openai_errors import ApiError, unavailable


class HeldBody:
    """One body; its bytes count against the bound of all bodies until it is released."""

    def __init__(self, bodies: Bodies) -> None:
        """Empty."""
        self.data = bytearray()
        self._bodies = bodies

    def append(self, chunk: bytes) -> None:
        """Adds what has arrived. Raises RequestRefused (413, or 429 when all bodies together are too much)."""
        self._bodies.take(len(self.data), len(chunk))
        self.data += chunk

    def release(self) -> None:
        """Gives the bytes back; harmless when done twice."""
        self._bodies.give_back(len(self.data))
        self.data = bytearray()


class Bodies:
    """All bodies held now."""

    def __init__(self, limits: Limits) -> None:
        """None yet."""
        self._limits = limits
        self.num_held_bytes = 0

    async def read(self, request: Request) -> HeldBody:
        """The whole body; the caller releases it. Raises RequestRefused (408, 413, 415, 429); ClientDisconnect if the client left."""
        self._check_head(request)
        body = HeldBody(self)
        try:
            async with asyncio.timeout(self._limits.body_timeout_s):
                async for chunk in request.stream():
                    body.append(chunk)
        except TimeoutError:
            body.release()
            message = f"The body did not arrive within {self._limits.body_timeout_s:g} seconds."
            raise RequestRefused(ApiError(408, message, "body_timeout", headers=_CLOSE)) from None
        except BaseException:
            body.release()
            raise
        return body

    def take(self, num_before: int, num_bytes: int) -> None:
        """Counts bytes of one body that has `num_before` already. Raises RequestRefused."""
        if num_before + num_bytes > self._limits.max_body_bytes:
            raise RequestRefused(self._too_large())
        if self.num_held_bytes + num_bytes > self._limits.max_held_body_bytes:
            message = "The gateway holds too many request bodies; try again."
            raise RequestRefused(unavailable(message, "gateway_busy", self._limits.retry_after_s, 429))
        self.num_held_bytes += num_bytes

    def give_back(self, num_bytes: int) -> None:
        """Bytes that are no longer held."""
        self.num_held_bytes -= num_bytes
        assert self.num_held_bytes >= 0, "more bytes were given back than taken"

    def _check_head(self, request: Request) -> None:
        if not _is_json(request.headers.get("content-type", "")):
            message = "The body must be JSON: send 'Content-Type: application/json'."
            raise RequestRefused(ApiError(415, message, "unsupported_media_type"))
        if request.headers.get("content-encoding", "identity") != "identity":
            message = "Compressed bodies are not supported."
            raise RequestRefused(ApiError(415, message, "unsupported_content_encoding"))
        declared = request.headers.get("content-length", "")
        if declared.isdecimal() and int(declared[:20]) > self._limits.max_body_bytes:
            raise RequestRefused(self._too_large())

    def _too_large(self) -> ApiError:
        message = f"The body is larger than {self._limits.max_body_bytes} bytes."
        return ApiError(413, message, "request_too_large")


#: Nobody knows when the rest of such a body comes. (The rest of one that is too large is read and dropped by the server below:
#: closing at once would reset the connection, and the client might never see the answer.)
_CLOSE = (("connection", "close"),)


def _is_json(content_type: str) -> bool:
    header = Message()
    header["content-type"] = content_type
    charset = header.get_content_charset("utf-8")
    return bool(content_type) and header.get_content_type() == "application/json" and charset in ("utf-8", "utf8")
