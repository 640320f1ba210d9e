"""A real `kvlease serve` process over stub servers, watched through its journal, its output, and /proc."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.waiting import wait_until

ROOT = Path(__file__).parents[2]
BOUND_S = 60.0


def wait_for(fact: Callable[[], object], what: str) -> None:
    """Until `fact()` is true, or fail."""
    wait_until(lambda: bool(fact()), within_s=BOUND_S, what=what)


def is_running(pid: int) -> bool:
    """Whether the process exists and is not a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


class Serving:
    """One run. `how` tells each command's stub how to misbehave."""

    def __init__(self, folder: Path, *flags: str, **how: str) -> None:
        self.journal = folder / "journal"
        self._out, self._err = folder / "out", folder / "err"
        environ = {name: value for name, value in os.environ.items() if not name.startswith("KVLEASE_")}
        environ |= {"PYTHONPATH": str(ROOT), "STUB": json.dumps({"journal": str(self.journal), **how})}
        environ["KVLEASE_SECRET"] = "a secret that serve must not pass on"
        with self._out.open("wb") as out, self._err.open("wb") as err:
            self.process = subprocess.Popen(
                [sys.executable, str(Path(__file__).with_name("stub_serve.py")), *flags],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env=environ,
                cwd=folder,
            )

    def __enter__(self) -> Serving:
        return self

    def __exit__(self, *_: object) -> None:
        """Leave nothing behind, whatever the test saw."""
        for pid in (self.process.pid, *self.pids()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self.process.wait(BOUND_S)

    @property
    def out(self) -> str:
        return self._out.read_text()

    @property
    def err(self) -> str:
        return self._err.read_text()

    def entries(self, what: str, command: str = "") -> list[dict[str, Any]]:
        """Journal lines of this kind, in order."""
        lines = self.journal.read_text().splitlines() if self.journal.exists() else []
        entries = [json.loads(line) for line in lines]
        return [entry for entry in entries if entry["what"] == what and command in ("", entry["command"])]

    def pids(self) -> list[int]:
        return [entry["pid"] for entry in self.entries("started")]

    def wait_until_ready(self) -> None:
        wait_for(lambda: "kvlease is ready" in self.out or self.process.poll() is not None, "the ready line")
        assert self.process.poll() is None, self.err

    def wait_for_exit(self) -> int:
        return self.process.wait(BOUND_S)
