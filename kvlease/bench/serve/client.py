"""A client of one server: asks, streams, and notes when what came.

Never: raises for what a server does to one request; that is an error of its sighting.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvlease.bench.errors import BenchFailed
from kvlease.bench.serve.answers import Sighting, refusal
from kvlease.bench.serve.exchange import Endpoint, EventLines, Exchange
from kvlease.bench.serve.limits import Limits

_OK = 200


@dataclass(frozen=True, slots=True)
class Asking:
    """Whom to ask and how. `timeout_s`: of one request. `model` empty: the server's first."""

    url: str
    model: str = ""
    api_key: str = ""
    chat: bool = False
    ignore_eos: bool = False
    timeout_s: float = 300.0

    def __post_init__(self) -> None:
        """Refuse a time in which nothing can come."""
        if self.timeout_s <= 0:
            raise ValueError("a timeout is positive")


class Client:
    """Asks one server."""

    def __init__(self, asking: Asking, limits: Limits) -> None:
        """Raises `BenchFailed` if its URL is none."""
        self._asking, self._limits = asking, limits
        self._endpoint = Endpoint.of(asking.url, asking.api_key)
        self.model = asking.model

    async def find_model(self) -> None:
        """The first model that the server names, unless one was given."""
        if self.model:
            return
        try:
            async with asyncio.timeout(self._limits.answer_s):
                exchange = await Exchange.open(self._endpoint, "GET", "/models", None, self._limits)
                try:
                    status, body = await exchange.begun(), await exchange.body()
                finally:
                    exchange.close()
        except (OSError, TimeoutError) as error:
            raise BenchFailed(f"nobody answers at {self._asking.url}: {str(error) or 'no answer in time'}") from error
        names = []
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            names = [str(model["id"]) for model in json.loads(body)["data"]]
        if status != _OK or not names:
            raise BenchFailed(f"{self._asking.url} names no model ({refusal(status, body)}): give one with --model")
        self.model = names[0]

    async def ask(self, prompt: str | Sequence[int], max_tokens: int) -> Sighting:
        """One request, whatever becomes of it. A prompt of token ids is for completions only."""
        seen = Sighting(time.monotonic())
        try:
            async with asyncio.timeout(self._asking.timeout_s):
                await self._stream(seen, self._body(prompt, max_tokens))
        except TimeoutError:
            seen.error = "timeout"
        except BenchFailed as error:
            seen.error = str(error)
        except OSError as error:
            seen.error = f"connection: {error.strerror or type(error).__name__}"
        seen.ended = time.monotonic()
        if not seen.error and not seen.pieces:
            seen.error = "no text"
        return seen

    async def _stream(self, seen: Sighting, body: dict[str, object]) -> None:
        path = "/chat/completions" if self._asking.chat else "/completions"
        exchange = await Exchange.open(self._endpoint, "POST", path, body, self._limits)
        try:
            status = await exchange.begun()
            if status != _OK:
                seen.error = refusal(status, await exchange.body())
                return
            events = EventLines()
            async for part in exchange.parts():
                now = time.monotonic()
                for event in events.feed(part):
                    if seen.take(event, now):
                        return
            seen.error = "the stream has no end"
        finally:
            exchange.close()

    def _body(self, prompt: str | Sequence[int], max_tokens: int) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._asking.ignore_eos:
            body["ignore_eos"] = True
        if self._asking.chat:
            return body | {"messages": [{"role": "user", "content": prompt}]}
        return body | {"prompt": prompt}
