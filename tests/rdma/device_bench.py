"""`kvlease bench transfer` over a real device, small: what it measures is measured by `scripts/prove`, on a machine that is left alone."""

from __future__ import annotations

import json
import subprocess
import sys


def test_the_transport_alone_is_measured_between_two_processes() -> None:
    command = [sys.executable, "-m", "kvlease", "bench", "transfer", "--transport", "rdma", "--no-verify", "--json"]
    sizes = [
        "--block-bytes",
        "65536",
        "--total-bytes",
        "1048576",
        "--ring-bytes",
        "524288",
        "--rounds",
        "1",
        "--latencies",
        "3",
    ]
    done = subprocess.run([*command, *sizes], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout)
    assert document["facts"]["transport"] == "rdma"
    measured = {figure["name"]: figure for figure in document["figures"]}
    assert measured["bare"]["median"] > 0
    assert measured["bare to stream"]["median"] > 0
