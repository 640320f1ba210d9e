"""What the inspection makes of a machine's files: each thing that is missing is a fault with advice."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from transport.rdma.inspection import Finding, look_at_files, look_at_memory


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A machine with a soft-RoCE device that everybody may use."""
    for folder in ("ib_core", "ib_uverbs", "rdma_rxe"):
        (tmp_path / "sys/module" / folder).mkdir(parents=True)
    device = tmp_path / "sys/class/infiniband/rxe0"
    device.mkdir(parents=True)
    (device / "parent").write_text("eth0\n")
    (tmp_path / "dev/infiniband").mkdir(parents=True)
    (tmp_path / "dev/infiniband/uverbs0").touch(0o666)
    return tmp_path


def faults(findings: Sequence[Finding]) -> list[str]:
    return [finding.subject for finding in findings if finding.state == "fault"]


def test_a_sound_machine_has_no_fault(machine: Path) -> None:
    findings = look_at_files(machine)
    assert not faults(findings)
    assert Finding("device", "ok", "rxe0 (soft-RoCE)") in findings
    assert Finding("module", "ok", "drivers: rdma_rxe") in findings


def test_an_empty_machine_lacks_everything_in_the_order_of_mending(tmp_path: Path) -> None:
    findings = look_at_files(tmp_path)
    assert faults(findings) == ["module", "module", "device", "permission"]
    assert all(finding.advice for finding in findings if finding.state == "fault")


def test_a_core_that_is_built_in_is_no_fault(machine: Path) -> None:
    (machine / "sys/module/ib_uverbs").rmdir()
    assert faults(look_at_files(machine)) == ["module"]
    (machine / "sys/class/infiniband_verbs").mkdir()
    assert not faults(look_at_files(machine))


def test_a_container_without_the_device_is_told_how_to_get_it(machine: Path) -> None:
    (machine / "dev/infiniband/uverbs0").unlink()
    (machine / ".dockerenv").touch()
    (fault,) = [finding for finding in look_at_files(machine) if finding.state == "fault"]
    assert "container" in fault.text
    assert "--device /dev/infiniband" in fault.advice


def test_a_device_that_may_not_be_opened_is_a_fault(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Root may open anything, so what the system would say to another user is said by its own function's stand-in.
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    (fault,) = [finding for finding in look_at_files(machine) if finding.state == "fault"]
    assert "uverbs0 (mode 6" in fault.text


RING = 32 << 20


def test_locked_memory_is_counted_in_rings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert look_at_memory(RING, -1).state == "ok"
    assert "3 rings" in look_at_memory(RING, 3 * RING).text
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert look_at_memory(RING, RING - 1).state == "fault"
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert look_at_memory(RING, RING - 1).state == "note"


def test_a_fault_without_advice_cannot_be_made() -> None:
    with pytest.raises(AssertionError):
        replace(Finding("device", "fault", "gone", "mend it"), advice="")
