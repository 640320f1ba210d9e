"""`kvlease doctor` on a machine with a device: every line is well. Run by `tests/rdma/test_guest.py` in the guest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from transport.rdma import DeviceChoice, usable_link


def test_the_doctor_finds_nothing_amiss_and_blocks_travel_between_two_processes(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "kvlease", "doctor", "--json"]
    # The second process must not take the cluster's secret, which a container names by a variable.
    environment = {**os.environ, "KVLEASE_SECRET_FILE": str(tmp_path / "secret")}
    (tmp_path / "secret").write_text("the secret of a cluster")
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["rdma"] is True
    told = {finding["subject"]: finding for finding in document["findings"]}
    assert told["choice"]["text"] == str(usable_link(DeviceChoice()))
    assert told["two local processes"]["text"].startswith("128 blocks came whole and in order")
    assert sum(finding["subject"] == "self-test" for finding in document["findings"]) == 3
    assert sum("<- chosen" in finding["text"] for finding in document["findings"]) == 1
