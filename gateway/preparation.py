"""Threads for parsing, templates and tokenizing, behind a bounded queue, so that the event loop never waits for a text.

Never: lets the queue grow: what does not fit is refused at once.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from gateway.errors import RequestRefused
from gateway.limits import Limits
from gateway.openai_errors import unavailable

T = TypeVar("T")


class Preparation:
    """A few threads and the places in front of them."""

    def __init__(self, limits: Limits) -> None:
        """Threads start with the first work."""
        self._limits = limits
        self._places = threading.BoundedSemaphore(limits.max_preparing + limits.preparation_threads)
        self._threads = ThreadPoolExecutor(limits.preparation_threads, thread_name_prefix="prepare")

    async def run(self, work: Callable[[], T]) -> T:
        """The result of `work`, or what it raised. Raises RequestRefused (429) when there is no place.

        Cancelled while queued, the work never starts; while running, its result is dropped.
        """
        if not self._places.acquire(blocking=False):
            message = "Too many requests are waiting to be tokenized; try again."
            raise RequestRefused(unavailable(message, "gateway_busy", self._limits.retry_after_s, 429))
        future = self._threads.submit(work)
        future.add_done_callback(lambda _: self._places.release())
        return await asyncio.wrap_future(future)

    def close(self) -> None:
        """Drops what is queued; a running text ends by itself."""
        self._threads.shutdown(wait=False, cancel_futures=True)
