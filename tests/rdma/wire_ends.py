"""The two machines of `tests/rdma/two_guests.py`, each in a guest of its own: prefill, gateway and client on one, decode on the other.

    python -m tests.rdma.wire_ends decode     until somebody connects to END_PORT
    python -m tests.rdma.wire_ends prefill    asks through a wire that loses packets, and whose cable is pulled; writes $OUT/phases.json

Blocks leave from the prefill side, so that is where the wire is spoiled.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from kvlease.models.tiny import make_tiny_model
from tests.waiting import wait_until

PREFILL, DECODE = "10.99.0.1", "10.99.0.2"
PREFILL_PORT, DECODE_PORT, HTTP_PORT, END_PORT = 9001, 9002, 8000, 9009
#: Torch takes most of a minute to load in an emulated machine, and both machines share the host's cores.
START_S = 1200.0
#: After the wire is whole again: a new pair, and an answer.
RECOVERY_S = 60.0
ANSWER_S = 120.0
PROMPTS = tuple(f"{'The wire is long and the night is cold. ' * count}Number {count}" for count in (1, 3, 8))
_OK = 200


@dataclass(frozen=True, slots=True)
class Phase:
    """What a client saw while the wire was in one state."""

    name: str
    num_right: int
    num_refused: int
    num_wrong: int
    slowest_s: float
    recovery_s: float = 0.0


@contextmanager
def running(command: str, *flags: str) -> Iterator[None]:
    """One server, with its log in $OUT."""
    environment = {**os.environ, "KVLEASE_SECRET": "a secret of two machines"}
    program = (sys.executable, "-m", "kvlease", command, *flags)
    with (Path(os.environ["OUT"]) / f"{command}.log").open("wb") as log:
        process = subprocess.Popen(program, env=environment, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait()


def model() -> Path:
    """The same tiny model on both machines: it is made from a seed."""
    return make_tiny_model(Path("/tmp/tiny"))


def shell(*command: str) -> None:
    """Change the wire."""
    subprocess.run(command, check=True)


def ask(prompt: str) -> tuple[int, str]:
    """Status and text of one completion."""
    connection = http.client.HTTPConnection("127.0.0.1", HTTP_PORT, timeout=ANSWER_S)
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        document = json.loads(answer.read())
        return answer.status, document["choices"][0]["text"] if answer.status == _OK else str(document)
    finally:
        connection.close()


def is_ready() -> bool:
    """Can the gateway serve?"""
    try:
        connection = http.client.HTTPConnection("127.0.0.1", HTTP_PORT, timeout=10)
        connection.request("GET", "/ready")
        return connection.getresponse().status == _OK
    except OSError:
        return False


def transports() -> set[str]:
    """What carries the pairs."""
    connection = http.client.HTTPConnection("127.0.0.1", HTTP_PORT, timeout=10)
    connection.request("GET", "/ready")
    return {pair["transport"] for pair in json.loads(connection.getresponse().read())["pairs"]}


def observe(name: str, expected: Sequence[str], recovery_s: float = 0.0) -> Phase:
    """Ask every prompt and compare."""
    right = refused = wrong = 0
    slowest_s = 0.0
    for prompt, text in zip(PROMPTS, expected, strict=True):
        started = time.monotonic()
        status, said = ask(prompt)
        slowest_s = max(slowest_s, time.monotonic() - started)
        if status != _OK:
            refused += 1
        elif said == text:
            right += 1
        else:
            wrong += 1
    return Phase(name, right, refused, wrong, slowest_s, recovery_s)


def pulled(seconds: float, expected: Sequence[str]) -> list[Phase]:
    """The cable is out for so long; somebody asks meanwhile, and afterwards."""
    shell("ip", "link", "set", "wire0", "down")
    down = time.monotonic()
    status, said = ask(PROMPTS[0])
    during = Phase(
        f"cable out for {seconds:g} s, asked meanwhile",
        num_right=int(status == _OK and said == expected[0]),
        num_refused=int(status != _OK),
        num_wrong=int(status == _OK and said != expected[0]),
        slowest_s=time.monotonic() - down,
    )
    wait_until(lambda: time.monotonic() - down > seconds, within_s=seconds + 1, what="the cable has been out")
    shell("ip", "link", "set", "wire0", "up")
    up = time.monotonic()
    wait_until(lambda: ask(PROMPTS[0]) == (_OK, expected[0]), within_s=RECOVERY_S, what="an answer comes again")
    return [during, observe(f"after {seconds:g} s", expected, time.monotonic() - up)]


def be_prefill() -> None:
    """Prefill, gateway and client."""
    at = (
        "--host",
        PREFILL,
        "--port",
        str(PREFILL_PORT),
        "--transport",
        "rdma",
        "--model",
        str(model()),
        "--threads",
        "1",
    )
    front = (
        "--port", str(HTTP_PORT), "--model", str(model()),
        "--prefill-addresses", f"{PREFILL}:{PREFILL_PORT}", "--decode-addresses", f"{DECODE}:{DECODE_PORT}",
    )  # fmt: skip
    with running("prefill", *at), running("gateway", *front):
        wait_until(is_ready, within_s=START_S, what="the cluster is ready")
        assert transports() == {"rdma"}
        expected = [said for status, said in map(ask, PROMPTS) if status == _OK]
        phases = [observe("whole", expected)]
        for percent in (1, 5):
            shell("tc", "qdisc", "replace", "dev", "wire0", "root", "netem", "loss", f"{percent}%")
            phases.append(observe(f"{percent} % lost", expected))
        shell("tc", "qdisc", "del", "dev", "wire0", "root")
        for seconds in (2.0, 30.0):
            phases += pulled(seconds, expected)
    (Path(os.environ["OUT"]) / "phases.json").write_text(json.dumps([asdict(phase) for phase in phases], indent=2))
    socket.create_connection((DECODE, END_PORT), timeout=30).close()


def be_decode() -> None:
    """Decode, until it is told that all is seen."""
    flags = (
        "--host", DECODE, "--port", str(DECODE_PORT), "--transport", "rdma", "--model", str(model()), "--threads", "1",
        "--prefill-addresses", f"{PREFILL}:{PREFILL_PORT}",
    )  # fmt: skip
    with running("decode", *flags), socket.create_server((DECODE, END_PORT)) as end:
        end.accept()


if __name__ == "__main__":
    be_prefill() if sys.argv[1] == "prefill" else be_decode()
