"""What this machine offers for tests of RDMA.

Never: loads a module of the kernel, or makes a device.
"""

from __future__ import annotations

from pathlib import Path

from transport.contract import Transport
from transport.rdma import DeviceChoice, open_rdma


def has_rdma_device() -> bool:
    """Is there a device, of hardware or soft-RoCE?"""
    folder = Path("/sys/class/infiniband")
    return folder.is_dir() and any(folder.iterdir())


def device_counter(name: str) -> int:
    """A counter of the first device, summed over what it counts under this name (packets)."""
    (path,) = Path("/sys/class/infiniband").glob(f"*/ports/1/hw_counters/{name}")
    return int(path.read_text())


def rdma_instead(_: Transport) -> Transport:
    """An rdma transport where a test's harness would take another."""
    return open_rdma(DeviceChoice())
