"""What this machine offers for tests of RDMA.

Never: loads a module of the kernel, or makes a device.
"""

from __future__ import annotations

from pathlib import Path

from transport.contract import Transport
from transport.rdma import DeviceChoice, open_rdma

#: As the guest names it, and anybody who follows docs/rdma.md.
SOFT_ROCE = "rxe0"


def has_rdma_device() -> bool:
    """Is there a device, of hardware or soft-RoCE?"""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def has_soft_roce() -> bool:
    """Is there the device that the device tests are written for?"""
    return (Path("/sys/class/infiniband") / SOFT_ROCE).is_dir()


def device_counter(name: str) -> int:
    """What soft-RoCE counts under this name (packets)."""
    return int((Path("/sys/class/infiniband") / SOFT_ROCE / "ports/1/hw_counters" / name).read_text())


def rdma_instead(_: Transport) -> Transport:
    """An rdma transport where a test's harness would take another."""
    return open_rdma(DeviceChoice())
