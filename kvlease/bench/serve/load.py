"""A bounded number of clients that ask one after the other, and what they saw.

Never: sends a prompt twice in one run, so that no cache of prefixes answers in the engine's place.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count
from random import Random

from kvlease.bench.errors import BenchFailed
from kvlease.bench.serve.answers import Sighting
from kvlease.bench.serve.client import Asking, Client
from kvlease.bench.serve.limits import Limits

#: Common words, which most tokenizers know as one token each.
_TEXT = (
    "time year people way day man thing woman life child world school state family student group country problem hand part "
    "place case week company system program question work number night point home water room mother area money story"
)


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """`duration_s`: no request begins later; 0: no bound."""

    asking: Asking
    concurrency: int = 4
    num_requests: int = 32
    prompt_tokens: int = 128
    max_tokens: int = 64
    duration_s: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        """Refuse what is no load."""
        if min(self.concurrency, self.num_requests, self.prompt_tokens, self.max_tokens) < 1:
            raise ValueError("concurrency, requests, prompt tokens and max tokens are at least 1")
        if self.duration_s < 0:
            raise ValueError("a duration is not negative")


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
    client = Client(plan.asking, limits)
    await client.find_model()
    prompts = Prompts(plan.seed, plan.prompt_tokens, limits.words_per_token)
    for _ in range(2):  # warms up, and learns how long a prompt of so many tokens is
        warm_up = await client.ask(prompts.next(), max_tokens=2)
        if warm_up.error:
            raise BenchFailed(f"{plan.asking.url}: the first request failed: {warm_up.error}")
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
