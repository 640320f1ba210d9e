"""`kvlease bench handoff`: real servers, real gRPC, a tiny model."""

from __future__ import annotations

import asyncio
import json

import pytest

from kvlease.bench.errors import PartnerFailed
from kvlease.bench.limits import Limits
from kvlease.bench.servers import server
from kvlease.cli.main import main

#: Five times the targets of a quiet machine, and more for one that tests share: what is broken is far slower.
MOST_US = {"handoff": 5 * 3_000.0 * 4, "rejected at the door": 5 * 2_000.0 * 4}


@pytest.mark.slow
def test_every_stage_is_measured_and_none_is_far_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "handoff", "--json", "--requests", "10"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)["figures"]}
    assert {row["samples"] for row in rows.values()} == {10}
    assert rows["verdict"]["low"] < rows["handoff"]["low"] < rows["arrived"]["low"]
    for name, most in MOST_US.items():
        assert 0 < rows[name]["median"] < most


def test_a_server_that_does_not_start_says_why() -> None:
    async def start() -> None:
        async with server("prefill", ("--model", "no-such-model"), Limits(), secret="s" * 32):
            pass

    with pytest.raises(PartnerFailed, match="no-such-model"):
        asyncio.run(start())


@pytest.mark.parametrize("flags", [("--requests", "0"), ("--prompt-tokens", "8"), ("--transport", "memory")])
def test_what_has_no_handoff_is_refused(capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]) -> None:
    assert main(["bench", "handoff", *flags]) == 2
    assert capsys.readouterr().err.count("\n") == 1
