"""A bounded number of clients that ask one after the other, and what they saw.

Never: sends a prompt twice in one run, so that no cache of prefixes answers in the engine's place.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from random import Random

from kvlease.bench.errors import BenchFailed
from kvlease.bench.serve.answers import Sighting, refusal
from kvlease.bench.serve.exchange import Endpoint, EventLines, Exchange
from kvlease.bench.serve.limits import Limits

_OK = 200
#: Common words, which most tokenizers know as one token each.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work number night point home water room mother area money story"
)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`duration_s`: no request begins later; 0: no bound. `timeout_s`: of one request. `model` empty: the server's first."""

    url: str
    model: str = ""
    api_key: str = ""
    chat: bool = False
    concurrency: int = 4
    num_requests: int = 32
    prompt_tokens: int = 128
    max_tokens: int = 64
    duration_s: float = 0.0
    timeout_s: float = 300.0
    ignore_eos: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no load."""
        if min(self.concurrency, self.num_requests, self.prompt_tokens, self.max_tokens) < 1:
            raise ValueError("concurrency, requests, prompt tokens and max tokens are at least 1")
        if self.duration_s < 0 or self.timeout_s <= 0:
            raise ValueError("a duration is not negative, and a timeout positive")


@dataclass(frozen=True, slots=True)
class LoadSeen:
    """All sightings of a run that took `wall_s`."""

    model: str
    sightings: tuple[Sighting, ...]
    wall_s: float


class Prompts:
    """Texts of about as many tokens as are wanted, all different."""

    def __init__(self, seed: int, num_tokens: int, words_per_token: float) -> None:
        """The same seed gives the same texts."""
        self._random = Random(f"kvlease {seed}")  # noqa: S311  texts, not secrets
        self._numbers, self._words = count(1), _TEXT.split()
        self._num_tokens = num_tokens
        self.words_per_token = words_per_token

    def next(self) -> str:
        """One that was not there before."""
        num_words = max(1, round(self._num_tokens * self.words_per_token) - 3)
        return f"{next(self._numbers)}. {' '.join(self._random.choices(self._words, k=num_words))}"

    def correct(self, num_counted: int) -> None:
        """The server counted so many tokens in the last one."""
        if num_counted:
            self.words_per_token *= self._num_tokens / num_counted


async def generate_load(plan: LoadPlan, limits: Limits, advance: Callable[[], None]) -> LoadSeen:
    """Run the plan; `advance` is called at the end of each request. Raises `BenchFailed` when there is no server to ask."""
    client = _Client(plan, Endpoint.of(plan.url, plan.api_key), limits)
    await client.find_model()
    prompts = Prompts(plan.seed, plan.prompt_tokens, limits.words_per_token)
    for _ in range(2):  # warms up, and learns how long a prompt of so many tokens is
        warm_up = await client.ask(prompts.next(), max_tokens=2)
        if warm_up.error:
            raise BenchFailed(f"{plan.url}: the first request failed: {warm_up.error}")
        prompts.correct(warm_up.num_prompt_tokens)
    started = time.monotonic()
    until = started + plan.duration_s if plan.duration_s else float("inf")
    turns = iter(range(plan.num_requests))
    found: list[Sighting] = []

    async def worker() -> None:
        for _ in _until(turns, until):
            found.append(await client.ask(prompts.next(), plan.max_tokens))
            advance()

    async with asyncio.TaskGroup() as group:
        for _ in range(plan.concurrency):
            group.create_task(worker())
    return LoadSeen(client.model, tuple(found), time.monotonic() - started)


def _until(turns: Iterator[int], deadline: float) -> Iterator[int]:
    """Turns of all workers, as long as there are any and it is not too late."""
    while time.monotonic() < deadline:
        turn = next(turns, None)
        if turn is None:
            return
        yield turn


class _Client:
    """Asks one server."""

    def __init__(self, plan: LoadPlan, endpoint: Endpoint, limits: Limits) -> None:
        self._plan, self._endpoint, self._limits = plan, endpoint, limits
        self.model = plan.model

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
            raise BenchFailed(f"nobody answers at {self._plan.url}: {str(error) or 'no answer in time'}") from error
        names = []
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            names = [str(model["id"]) for model in json.loads(body)["data"]]
        if status != _OK or not names:
            raise BenchFailed(f"{self._plan.url} names no model ({refusal(status, body)}): give one with --model")
        self.model = names[0]

    async def ask(self, prompt: str, max_tokens: int) -> Sighting:
        """One request, whatever becomes of it."""
        seen = Sighting(time.monotonic())
        try:
            async with asyncio.timeout(self._plan.timeout_s):
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
        path = "/chat/completions" if self._plan.chat else "/completions"
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

    def _body(self, prompt: str, max_tokens: int) -> dict[str, object]:
        body: dict[str, object] = {
            "model": self.model,
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self._plan.ignore_eos:
            body["ignore_eos"] = True
        if self._plan.chat:
            return body | {"messages": [{"role": "user", "content": prompt}]}
        return body | {"prompt": prompt}
