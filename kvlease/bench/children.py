"""How a process of a measurement is started, and how it is ended.

Never: ends a process that it did not start.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress
from pathlib import Path

import kvlease


def child_environ() -> dict[str, str]:
    """Ours, with this kvlease first among what the child imports."""
    root = str(Path(kvlease.__file__).parents[1])
    return os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH"))))}


async def ended(process: asyncio.subprocess.Process, leave_s: float) -> None:
    """Wait for a process that was told to go; after `leave_s` it is killed."""
    try:
        async with asyncio.timeout(leave_s):
            await process.wait()
    except TimeoutError:
        with suppress(ProcessLookupError):
            process.kill()
        await process.wait()
