"""A prefill and a decode server on two machines that share a wire: packets lost, and the cable pulled. Run by `scripts/prove`.

Each machine is a guest (`tests/rdma/guest`). What a client saw is judged here: not one wrong text in any state of the wire; with packets lost
every text comes; with the cable out a clear refusal or a late answer; and answers again when it is back.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from kvlease.cli.ports import reserve_port
from tests.rdma.wire_ends import PROMPTS, RECOVERY_S

ROOT = Path(__file__).resolve().parents[2]
#: For both machines, starting included.
_BOUND_S = 2400


def start(host: int, wire: int, role: str, out: Path) -> subprocess.Popen[bytes]:
    """One machine."""
    options = (
        "--seconds",
        str(_BOUND_S),
        "--memory",
        "2500",
        "--host",
        str(host),
        "--wire",
        str(wire),
        "--out",
        str(out),
    )
    command = (str(ROOT / "tests/rdma/guest"), *options, sys.executable, "-m", "tests.rdma.wire_ends", role)
    return subprocess.Popen(command, cwd=ROOT, stdout=(out / "said").open("wb"), stderr=subprocess.STDOUT)


def judge(phases: Sequence[dict[str, float | str]]) -> list[str]:
    """What is wrong with what the client saw."""
    wrong = [f"{phase['name']}: {phase['num_wrong']} wrong texts" for phase in phases if phase["num_wrong"]]
    missing = [
        f"{phase['name']}: {phase['num_right']} of {len(PROMPTS)} texts"
        for phase in phases
        if "meanwhile" not in str(phase["name"]) and phase["num_right"] != len(PROMPTS)
    ]
    return wrong + missing


def main() -> int:
    """Both machines, from boot to verdict."""
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        wire = stack.enter_context(reserve_port("127.0.0.1", 0)).getsockname()[1]
        stack.close()
        folders = [Path(scratch) / role for role in ("prefill", "decode")]
        for folder in folders:
            folder.mkdir()
        machines = [start(host, wire, folder.name, folder) for host, folder in enumerate(folders, start=1)]
        codes = [machine.wait() for machine in machines]
        report = folders[0] / "phases.json"
        if any(codes) or not report.exists():
            for folder in folders:
                for log in [*sorted(folder.glob("*.log")), folder / "said"]:
                    print(f"== {folder.name}/{log.name}\n{log.read_text(errors='replace')[-4000:]}")
            print(f"the machines ended with {codes}")
            return 1
        phases = json.loads(report.read_text())
    faults = judge(phases)
    print("\n".join(faults))
    recoveries = ", ".join(f"{phase['recovery_s']:.1f} s" for phase in phases if phase["recovery_s"])
    lossy = ", ".join(f"{phase['name']} {phase['slowest_s']:.1f} s" for phase in phases if "lost" in phase["name"])
    print(
        f"{len(phases)} states of a wire between two machines, {len(faults)} faults; slowest answer: {lossy};"
        f" back after {recoveries} (of {RECOVERY_S:g})"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
