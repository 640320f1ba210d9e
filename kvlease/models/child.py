"""Running one program to its end on behalf of a preparation.

Owns the child process: its time limit, its two log files and its end.

Never: leaves a child behind, or mixes its output with ours.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_TICK_S: Final = 0.2


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a child ended; `complaint` is the last line of its standard error."""

    succeeded: bool
    complaint: str


def run_child(
    command: Sequence[str], environment: Mapping[str, str], log: Path, limit_s: float, tick: Callable[[], None]
) -> Outcome:
    """Run `command` for at most `limit_s` seconds with `tick` called meanwhile; output goes to `log`.out and `log`.err."""
    errors = log.with_suffix(".err")
    with log.with_suffix(".out").open("wb") as out, errors.open("wb") as err:
        process = subprocess.Popen(  # noqa: S603 - our own interpreter
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=err, env=dict(environment)
        )
        try:
            in_time = _wait(process, limit_s, tick)
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
    if not in_time:
        return Outcome(succeeded=False, complaint=f"it took more than {limit_s:.0f} s")
    lines = errors.read_text(encoding="utf-8", errors="replace").split("\n")
    last = next((line.strip() for line in reversed(lines) if line.strip()), f"exit status {process.returncode}")
    return Outcome(succeeded=process.returncode == 0, complaint=last)


def _wait(process: subprocess.Popen[bytes], limit_s: float, tick: Callable[[], None]) -> bool:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        try:
            process.wait(timeout=_TICK_S)
        except subprocess.TimeoutExpired:
            tick()
        else:
            return True
    return False
