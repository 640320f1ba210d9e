"""Each guard that the explorer can see is missed when it is gone. Those that need bytes of a forger are run by scripts/prove."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.explorer.mutation import ROOT


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_removed_guard_is_missed() -> None:
    """In a process of its own: this one has imported what is to be changed."""
    command = [sys.executable, "-m", "tests.explorer.mutation", "--quick", "--terse"]
    ran = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=880, check=False)
    assert ran.returncode == 0, ran.stdout + ran.stderr
