"""`kvlease doctor` on a machine with a device: every line is well. Run by `tests/rdma/test_guest.py` in the guest."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_doctor_finds_nothing_amiss_and_blocks_travel_between_two_processes() -> None:
    command = [sys.executable, "-m", "kvlease", "doctor", "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["rdma"] is True
    told = {finding["subject"]: finding for finding in document["findings"]}
    assert told["choice"]["text"] == "rxe0 port 1 GID 1 (10.99.0.1)"
    assert told["two local processes"]["text"].startswith("128 blocks came whole and in order")
    assert sum(finding["subject"] == "self-test" for finding in document["findings"]) == 3
    assert sum("<- chosen" in finding["text"] for finding in document["findings"]) == 1
