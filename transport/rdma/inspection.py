"""What stands between this machine and RDMA, in the order in which a person would look: kernel, devices, permissions, library, ports, memory.

Each `Finding` that is a fault says what to do about it. The first half reads files only, so that it also works where nothing else does.

Never: changes anything, or loads a module.
"""

from __future__ import annotations

import importlib.metadata
import os
import resource
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from transport.errors import TransportError
from transport.rdma.devices import DeviceChoice, Gid, Link, PortFacts, choose_link

#: Modules of the core, what each gives, and the folder that shows it also where it is built into the kernel.
_CORE_MODULES = (
    ("ib_core", "the kernel's RDMA core", "sys/class/infiniband"),
    ("ib_uverbs", "access from programs", "sys/class/infiniband_verbs"),
)
_DRIVERS = (
    "rdma_rxe",
    "siw",
    "mlx4_ib",
    "mlx5_ib",
    "irdma",
    "bnxt_re",
    "efa",
    "hns_roce_hw_v2",
    "qedr",
    "ocrdma",
    "cxgb4",
    "vmw_pvrdma",
    "mana_ib",
    "ionic_rdma",
)
_INSTALL = "install Debian's python3-pyverbs and ibverbs-providers, or pip install pyverbs"


@dataclass(frozen=True, slots=True)
class Finding:
    """One fact: `ok`, `note` (worth knowing), `fault`, or `skipped` (could not be looked at). A fault comes with advice."""

    subject: str
    state: str
    text: str
    advice: str = ""

    def __post_init__(self) -> None:
        """Hold to the four states, and to advice for each fault."""
        assert self.state in ("ok", "note", "fault", "skipped"), self.state
        assert self.advice or self.state != "fault", f"a fault without advice: {self.text}"


def look_at_files(root: Path = Path("/")) -> list[Finding]:
    """Kernel modules, devices and their permissions, from the file systems below `root`."""
    return [*_modules(root), *_devices(root), *_permissions(root)]


def look_at_library() -> Finding:
    """Can pyverbs be imported, and which is it?"""
    try:
        import pyverbs.device  # noqa: F401, PLC0415 - that it can be is the question
    except ImportError as error:
        return Finding("pyverbs", "fault", f"cannot be imported: {error}", _INSTALL)
    try:
        version = importlib.metadata.version("pyverbs")
    except importlib.metadata.PackageNotFoundError:
        version = "the system's"  # Debian's package carries no metadata
    return Finding("pyverbs", "ok", f"{version}, with {_libibverbs()}")


def look_at_ports(choice: DeviceChoice) -> tuple[list[Finding], Link | None]:
    """Each port with its GID table, the chosen entry marked, and the choice itself. Needs pyverbs."""
    from transport.rdma.transport import all_ports  # noqa: PLC0415 - needs pyverbs

    try:
        ports = all_ports()
    except TransportError as error:
        return [Finding("port", "fault", str(error), "allow this user to read and write /dev/infiniband/uverbs*")], None
    link = choose_link(ports, choice)
    findings = [_port(facts) for facts in ports]
    findings += [_gid(facts, gid, link) for facts in ports for gid in facts.gids if any(gid.gid)]
    if isinstance(link, str):
        return [*findings, Finding("choice", "fault", link, "see the lines above")], None
    return [*findings, Finding("choice", "ok", str(link))], link


def look_at_memory(ring_bytes: int, limit: int | None = None) -> Finding:
    """Can a ring be pinned? `limit`: bytes of memory that may be locked, -1 without limit; `None` asks the system."""
    allowed = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] if limit is None else limit
    if allowed == resource.RLIM_INFINITY:
        return Finding("memlock", "ok", "unlimited")
    num_rings = allowed // ring_bytes
    text = f"{allowed >> 10} KiB may be locked: {num_rings} rings of {ring_bytes >> 10} KiB"
    if num_rings or os.geteuid() == 0:  # root's locked memory is not counted
        return Finding("memlock", "note", text + (", but this is root" if not num_rings else ", one for each pair"))
    return Finding(
        "memlock",
        "fault",
        text,
        "ulimit -l unlimited; LimitMEMLOCK=infinity in systemd; a memlock ulimit of -1 in a container",
    )


def _modules(root: Path) -> Iterable[Finding]:
    for name, purpose, folder in _CORE_MODULES:
        if (root / "sys/module" / name).is_dir() or (root / folder).is_dir():
            yield Finding("module", "ok", f"{name} ({purpose})")
        else:
            yield Finding(
                "module",
                "fault",
                f"{name} is not loaded ({purpose})",
                f"modprobe {name}; in a container or guest, on its host",
            )
    drivers = [name for name in _DRIVERS if (root / "sys/module" / name).is_dir()]
    if drivers:
        yield Finding("module", "ok", f"drivers: {', '.join(drivers)}")
    else:
        yield Finding("module", "note", "none of the known drivers is loaded as a module; one may be built in")


def _devices(root: Path) -> Iterable[Finding]:
    folder = root / "sys/class/infiniband"
    names = sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
    if not names:
        advice = "load the driver of the card, or make a soft-RoCE device: rdma link add rxe0 type rxe netdev IFACE"
        yield Finding("device", "fault", "no RDMA device", advice)
    for name in names:
        yield Finding("device", "ok", name + (" (soft-RoCE)" if (folder / name / "parent").exists() else ""))


def _permissions(root: Path) -> Iterable[Finding]:
    folder = root / "dev/infiniband"
    where = " (this is a container)" if _is_container(root) else ""
    nodes = sorted(folder.glob("uverbs*")) if folder.is_dir() else []
    if not nodes:
        yield Finding(
            "permission",
            "fault",
            f"/dev/infiniband has no uverbs device{where}",
            "modprobe ib_uverbs; for a container: --device /dev/infiniband",
        )
    for node in nodes:
        mode = f"{node.stat().st_mode & 0o777:o}"
        if os.access(node, os.R_OK | os.W_OK):
            yield Finding("permission", "ok", f"{node.name} can be read and written")
        else:
            yield Finding(
                "permission",
                "fault",
                f"{node.name} (mode {mode}) may not be read and written by user {os.geteuid()}{where}",
                "chmod 666 /dev/infiniband/uverbs*, a udev rule, or the group that owns it",
            )


def _is_container(root: Path) -> bool:
    return (root / ".dockerenv").exists() or (root / "run/.containerenv").exists()


def _port(facts: PortFacts) -> Finding:
    layer = "Ethernet" if facts.is_ethernet else f"InfiniBand, LID {facts.lid}"
    text = f"{facts.device}:{facts.port} is {facts.state}, {layer}, MTU {facts.mtu_bytes}"
    if not facts.is_active:
        return Finding("port", "note", text)
    if facts.is_ethernet and facts.mtu_bytes < 4096:
        return Finding("port", "note", text + "; 4096 is faster and needs an interface MTU of 4200 or more")
    return Finding("port", "ok", text)


def _gid(facts: PortFacts, gid: Gid, link: Link | str) -> Finding:
    is_chosen = isinstance(link, Link) and (link.device, link.port, link.gid) == (facts.device, facts.port, gid)
    mark = " <- chosen" if is_chosen else ""
    return Finding(
        "gid",
        "ok" if is_chosen else "note",
        f"{facts.device}:{facts.port} GID {gid.index}: {gid.text} ({gid.type.value}){mark}",
    )


def _libibverbs() -> str:
    """The library that is mapped into this process; its file name has its version."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        name = line.rpartition("/")[2]
        if name.startswith("libibverbs.so"):
            return name
    return "libibverbs"
