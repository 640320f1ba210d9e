"""`kvlease doctor` where there is no RDMA device; with one it is tried by `tests/rdma/device_doctor.py`."""

from __future__ import annotations

import json

import pytest

from kvlease.cli.main import main
from tests.rdma.machine import has_rdma_device

pytestmark = pytest.mark.skipif(has_rdma_device(), reason="this machine has an RDMA device")


def test_each_fault_is_followed_by_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    faults = [index for index, line in enumerate(lines) if line.startswith("fault")]
    assert faults
    assert all(lines[index + 1].lstrip().startswith("-> ") for index in faults)
    assert any(line.startswith("skipped") and "self-test" in line for line in lines)


def test_programs_get_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["rdma"] is False
    assert {"subject": "device", "state": "fault"}.items() <= next(
        finding for finding in document["findings"] if finding["subject"] == "device"
    ).items()


def test_a_path_needs_the_secret_and_a_listener_a_device(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["doctor", "--peer", "127.0.0.1:1"]) == 2
    assert "secret" in capsys.readouterr().err
    monkeypatch.setenv("KVLEASE_SECRET", "0123456789abcdef")
    assert main(["doctor", "--listen"]) == 2
    assert "rdma" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [("--rdma-device", ":"), ("--peer", "nowhere"), ("--ring-bytes", "many")])
def test_malformed_options_are_one_line(flags: tuple[str, str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *flags]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1
