"""Boots the guest once and runs every device test in it, on a real soft-RoCE device. See docs/rdma.md.

Where this machine has a soft-RoCE device of its own the same tests run here, without a guest.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.rdma.machine import has_soft_roce

ROOT = Path(__file__).resolve().parents[2]
GUEST = Path(__file__).with_name("guest")
#: The guest's own limit; a boot and all device tests take about four minutes on two idle cores.
_GUEST_S = 900
_NO_TOOLS = 77

pytestmark = [pytest.mark.slow, pytest.mark.timeout(_GUEST_S + 60)]


@dataclass(frozen=True, slots=True)
class GuestRun:
    """What the device tests said. `counters`: packets that crossed the device, before and after."""

    output: str
    exit_code: int
    outcomes: Mapping[str, str]
    packets_before: int
    packets_after: int


@pytest.fixture(scope="module")
def guest_run(tmp_path_factory: pytest.TempPathFactory) -> GuestRun:
    """One boot, one run of pytest."""
    out = tmp_path_factory.mktemp("out")
    if has_soft_roce():
        command, environment = [str(GUEST.with_name("on_device"))], {**os.environ, "OUT": str(out)}
    else:
        command, environment = (
            [str(GUEST), "--seconds", str(_GUEST_S), "--out", str(out), "tests/rdma/on_device"],
            dict(os.environ),
        )
    environment["PATH"] = f"{Path(sys.executable).parent}:{environment['PATH']}"
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode == _NO_TOOLS:
        # Where CI runs as root, scripts/test has installed the tools: a skip would hide that nothing was tried.
        assert not (os.environ.get("CI") and os.geteuid() == 0), done.stderr
        pytest.skip(done.stderr.strip())
    report = out / "report.xml"
    assert report.exists(), done.stdout + done.stderr
    before, after = (int((out / name).read_text()) for name in ("packets_before", "packets_after"))
    return GuestRun(done.stdout, done.returncode, _outcomes(report), before, after)


def _outcomes(report: Path) -> dict[str, str]:
    cases = ET.parse(report).iter("testcase")
    return {f"{case.get('classname')}.{case.get('name')}": _outcome(list(case)) for case in cases}


def _outcome(children: Sequence[ET.Element]) -> str:
    return next((child.tag for child in children if child.tag in ("failure", "error", "skipped")), "passed")


def test_every_device_test_passes_and_none_is_skipped(guest_run: GuestRun) -> None:
    bad = {name: outcome for name, outcome in guest_run.outcomes.items() if outcome != "passed"}
    assert guest_run.exit_code == 0, guest_run.output[-6000:]
    assert not bad


def test_the_conformance_suite_ran_whole(guest_run: GuestRun) -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "tests/transport/test_tcp.py"]
    collected = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    wanted = {
        line.partition("::")[2].partition("::")[2] for line in collected.splitlines() if "TestTcpConformance::" in line
    }
    ran = {name.partition("TestRdmaConformance.")[2] for name in guest_run.outcomes if "TestRdmaConformance." in name}
    assert wanted
    assert ran == wanted


def test_the_packets_really_crossed_the_device(guest_run: GuestRun) -> None:
    # The conformance suite alone sends tens of MiB, in packets of at most 4 KiB.
    assert guest_run.packets_after - guest_run.packets_before > 10_000
