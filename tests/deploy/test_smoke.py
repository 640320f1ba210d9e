"""The whole cluster in real containers, on a real Docker engine of our own: `deploy/smoke`, as a user runs it."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_NO_ENGINE = 77
_BOUND_S = 900  # the first time, with a base to make and packages to fetch; later a tenth of it


def why_not() -> str | None:
    """Why no engine can be started here; None: it can be tried."""
    if os.geteuid() != 0:
        return "starting a Docker engine needs root"
    if shutil.which("dockerd") is None and shutil.which("apt-get") is None:
        return "there is no dockerd, and no apt to install it with"
    return None


@pytest.mark.slow
@pytest.mark.timeout(_BOUND_S + 100)
def test_requests_are_answered_while_containers_die_and_come_back(capfd: pytest.CaptureFixture[str]) -> None:
    if reason := why_not():
        pytest.skip(reason)
    command = [str(ROOT / "deploy/smoke"), "--own-engine", "--model", "tiny"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BOUND_S, check=False)
    with capfd.disabled():
        print(f"\n{done.stdout}")
    if done.returncode == _NO_ENGINE:
        pytest.skip(done.stderr)
    assert done.returncode == 0, done.stdout + done.stderr
    for service in ("prefill-0", "decode-0"):
        assert f"{service} is dead: " in done.stdout
        assert f"{service} came back at " in done.stdout
    assert "every container says that it is healthy" in done.stdout
