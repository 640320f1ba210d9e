"""Waiting for a fact, with a bound: the only place in the tests that may sleep.

Never: waits for time to pass; a test that does hides a race.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

POLL_S = 0.005


def wait_until(fact: Callable[[], bool], *, within_s: float = 5.0, what: str = "") -> None:
    """Return as soon as `fact()` is true; fail the test if that takes longer than `within_s`."""
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what or fact}"
        time.sleep(POLL_S)


async def until(fact: Callable[[], bool], *, within_s: float = 5.0, what: str = "") -> None:
    """The same without blocking the event loop."""
    deadline = time.monotonic() + within_s
    while not fact():
        assert time.monotonic() < deadline, f"not within {within_s} s: {what or fact}"
        await asyncio.sleep(POLL_S)
