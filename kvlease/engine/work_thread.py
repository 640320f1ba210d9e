"""One thread that does one piece of work at a time for an event loop: a forward pass, a copy into or out of a ring.

Never: leaves a piece of work running behind the back of the task that asked for it: a cancelled task waits for its end first, so what the
work touches may be freed when the task has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

from kvlease.engine.limits import Limits

P = ParamSpec("P")
Result = TypeVar("Result")


class WorkThread:
    """Work in order of asking. `close` waits for the piece at hand."""

    def __init__(self, name: str, limits: Limits | None = None) -> None:
        """The thread starts with the first piece of work."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._limits = limits or Limits()
        self._num_bytes_here = 0

    async def run(self, work: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """The result of the work, or its exception. Cancelled: raises only when the work has ended."""
        future = asyncio.wrap_future(self._executor.submit(work, *args, **kwargs))
        try:
            return await asyncio.shield(future)
        except asyncio.CancelledError:
            while not future.done():
                try:
                    await asyncio.wait([future])
                except asyncio.CancelledError:
                    continue  # asked again: the answer is the same
            if not future.cancelled():
                future.exception()  # seen; the task ends by its cancellation
            raise

    async def run_copy(self, num_bytes: int, copy: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result:
        """As `run`, for a copy of so many bytes within host memory. Not in order with what the thread has still to do.

        A short one is done here, in the loop: to hand it over and be woken costs several times what it takes. After every
        `max_copy_here_bytes` the loop has its turn first.
        """
        if num_bytes > self._limits.max_copy_here_bytes:
            return await self.run(copy, *args, **kwargs)
        self._num_bytes_here += num_bytes
        if self._num_bytes_here > self._limits.max_copy_here_bytes:
            self._num_bytes_here = num_bytes
            await asyncio.sleep(0)  # before the copy: who is cancelled here has lost nothing
        return copy(*args, **kwargs)

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=True)
