"""One thread that does one piece of work at a time for an event loop: a forward pass, a copy into or out of a ring.

Never: leaves a piece of work running behind the back of the task that asked for it: a cancelled task waits for its end first, so what the
work touches may be freed when the task has ended.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
Result = TypeVar("Result")


class WorkThread:
    """Work in order of asking. `close` waits for the piece at hand."""

    def __init__(self, name: str) -> None:
        """The thread starts with the first piece of work."""
        self._executor = ThreadPoolExecutor(1, thread_name_prefix=name)

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

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=True)
