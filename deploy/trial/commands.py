"""Commands of others, each within a bound, and the one error that ends a trial.

Never: goes on after a command that failed, unless its caller asked for the status.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_SHOWN_LINES = 30  # of a failed command's output
_POLL_S = 0.2
_started = time.monotonic()


class TrialFailed(Exception):
    """Something did not go as it must. The message says what, and what was seen."""


class NoEngine(TrialFailed):
    """Nothing was tried, since no Docker engine can be had on this machine."""


def say(line: str) -> None:
    """One line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _started:6.1f} s] {line}", flush=True)


def run(command: Sequence[str], *, within_s: float, environ: Mapping[str, str] | None = None) -> str:
    """Standard output of `command`. Raises TrialFailed with the end of its output when it fails or takes too long."""
    status, output = attempt(command, within_s=within_s, environ=environ)
    if status != 0:
        shown = "\n    ".join(output.splitlines()[-_SHOWN_LINES:])
        how = f"took more than {within_s:.0f} s" if status is None else f"ended with status {status}"
        raise TrialFailed(f"`{' '.join(command)}` {how}:\n    {shown}")
    return output


def attempt(
    command: Sequence[str], *, within_s: float, environ: Mapping[str, str] | None = None
) -> tuple[int | None, str]:
    """Status and output (both streams) of `command`; None: it took too long and was killed. 127: there is no such command."""
    try:
        done = subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            timeout=within_s,
            env={**os.environ, **(environ or {})},
            cwd=ROOT,
        )
    except subprocess.TimeoutExpired as error:
        return None, (error.stdout or b"").decode(errors="replace")
    except FileNotFoundError as error:
        return 127, str(error)
    return done.returncode, done.stdout.decode(errors="replace")


def wait_for(fact: Callable[[], bool], *, within_s: float, what: str) -> float:
    """Seconds until `fact()` was true. Raises TrialFailed naming `what`."""
    started = time.monotonic()
    while not fact():
        if time.monotonic() - started > within_s:
            raise TrialFailed(f"not within {within_s:.0f} s: {what}")
        time.sleep(_POLL_S)
    return time.monotonic() - started


def install(*packages: str) -> None:
    """Packages of Debian, as root only. Raises TrialFailed that says what to install."""
    if os.geteuid() != 0 or attempt(["apt-get", "--version"], within_s=10)[0] != 0:
        raise TrialFailed(f"please install {' '.join(packages)} (named as in Debian) and try again")
    say(f"installing {' '.join(packages)} with apt")
    environ = {"DEBIAN_FRONTEND": "noninteractive"}
    run(["apt-get", "-qq", "update"], within_s=180, environ=environ)
    run(
        ["apt-get", "-qq", "install", "--yes", "--no-install-recommends", *packages],
        within_s=300,
        environ=environ,
    )


def complain(error: TrialFailed) -> None:
    """The last word of a trial that failed."""
    print(f"deploy/smoke: FAILED: {error}", file=sys.stderr, flush=True)
