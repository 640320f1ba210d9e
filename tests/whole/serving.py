"""`kvlease serve` as a user starts it: its own process, real servers, a free port."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.waiting import wait_until

START_S = 180.0  # a first start fetches and converts the default model
STOP_S = 60.0
POOL_BLOCKS = 512  # of 16 tokens
POOL_FLAGS = ("--prefill-blocks", str(POOL_BLOCKS), "--decode-blocks", str(POOL_BLOCKS))


@dataclass(frozen=True, slots=True)
class Served:
    """A cluster that can answer."""

    url: str  # without /v1
    process: subprocess.Popen[bytes]
    log: Path

    def children(self) -> dict[str, int]:
        """Process ids of the servers, by command."""
        found = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and _parent(entry) == self.process.pid:
                words = (entry / "cmdline").read_bytes().decode().split("\0")
                role = next((word for word in words if word in ("gateway", "prefill", "decode")), None)
                if role is not None:
                    found[role] = int(entry.name)
        return found

    def peak_bytes(self, role: str) -> int:
        """The most resident memory that the server has had."""
        found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.children()[role]}/status").read_text())
        assert found
        return int(found.group(1)) * 1024

    def cpu_seconds(self, role: str) -> float:
        """Processor time that the server has used, of all its threads."""
        fields = Path(f"/proc/{self.children()[role]}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def served(folder: Path, *flags: str, command: Sequence[str] = (sys.executable, "-m", "kvlease")) -> Iterator[Served]:
    """Start it, wait for its line, stop it. `command`: what `kvlease` is."""
    out, log = folder / "out", folder / "log"
    environ = {name: value for name, value in os.environ.items() if not name.startswith("KVLEASE_")}
    with out.open("wb") as stdout, log.open("wb") as stderr:
        words = [*command, "serve", "--port", "0", *flags]
        process = subprocess.Popen(words, stdout=stdout, stderr=stderr, env=environ, cwd=folder)
    try:
        wait_until(
            lambda: process.poll() is not None or b"ready:" in out.read_bytes(), within_s=START_S, what="the ready line"
        )
        found = re.search(r"http://[0-9.]+:\d+", out.read_text())
        assert found, log.read_text()[-4000:]
        yield Served(found.group(), process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            process.kill()


def _parent(entry: Path) -> int:
    try:
        return int((entry / "stat").read_text().rsplit(")", 1)[1].split()[1])
    except OSError:
        return 0
