"""Servers for a measurement: the shipped command in processes of their own, found by what they print, ended at the end.

Never: leaves one running, or goes through anything but its public command line.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from typing import IO

from kvlease.bench.children import child_environ, ended
from kvlease.bench.errors import PartnerFailed
from kvlease.bench.limits import Limits

_WHERE = re.compile(rb"(?:is listening: |is ready: )(\S+)")


@dataclass(frozen=True, slots=True)
class Served:
    """A server that said where it is: `host:port`, or a URL. `start_s`: from its start to that line (s)."""

    where: str
    start_s: float
    process: asyncio.subprocess.Process


@asynccontextmanager
async def server(
    command: str, flags: Sequence[str], limits: Limits, *, secret: str = "", threads: int = 1
) -> AsyncIterator[Served]:
    """`kvlease command flags`, from its line to its end. Raises `PartnerFailed` with its last words."""
    environ = {name: value for name, value in child_environ().items() if not name.startswith("KVLEASE_")}
    environ |= {"OMP_NUM_THREADS": str(threads), "MKL_NUM_THREADS": str(threads)}
    if kept := os.environ.get("KVLEASE_CACHE"):
        environ["KVLEASE_CACHE"] = kept
    if secret:
        environ["KVLEASE_SECRET"] = secret
    with tempfile.TemporaryFile() as log:
        started = time.monotonic()
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", "kvlease", command, *flags),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=environ,
        )
        try:
            where = await _said(process, limits, log)
            yield Served(where, time.monotonic() - started, process)
        finally:
            with suppress(ProcessLookupError):
                process.terminate()
            await ended(process, limits.leave_s)


async def _said(process: asyncio.subprocess.Process, limits: Limits, log: IO[bytes]) -> str:
    assert process.stdout is not None
    try:
        async with asyncio.timeout(limits.start_s):
            while line := await process.stdout.readline():
                if found := _WHERE.search(line):
                    return found.group(1).decode()
    except TimeoutError:
        raise PartnerFailed(f"a server did not start within {limits.start_s:g} s") from None
    log.seek(0)
    words = log.read().decode(errors="replace").strip().splitlines()
    raise PartnerFailed(f"a server ended at its start: {words[-1] if words else 'without a word'}")
