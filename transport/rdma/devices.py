"""Which device, port and GID carry the channels: the facts that a machine offers, and the choice among them.

Never: asks a device anything; the facts come from `transport.rdma.verbs`.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

GID_BYTES = 16
#: The first 12 bytes of a GID that stands for an IPv4 address (RFC 4291, section 2.5.5.2).
_IPV4_MAPPED = bytes(10) + b"\xff\xff"
#: `fe80::/10` as a GID begins: it reaches no farther than the link.
_LINK_LOCAL = b"\xfe\x80"


class GidType(Enum):
    """How packets to this GID are wrapped."""

    INFINIBAND = "IB"
    ROCE_V1 = "RoCE v1"
    ROCE_V2 = "RoCE v2"


@dataclass(frozen=True, slots=True)
class Gid:
    """One entry of a port's GID table."""

    index: int
    gid: bytes
    type: GidType

    @property
    def is_ipv4(self) -> bool:
        """Does it stand for an IPv4 address?"""
        return self.gid.startswith(_IPV4_MAPPED)

    @property
    def text(self) -> str:
        """The IPv4 address, or the GID in hexadecimal groups."""
        if self.is_ipv4:
            return ".".join(str(byte) for byte in self.gid[12:])
        return self.gid.hex(":", 2)


@dataclass(frozen=True, slots=True)
class PortFacts:
    """What one port of a device says of itself. `mtu` is the verbs' number of it: 1 is 256 bytes, 5 is 4096."""

    device: str
    port: int
    state: str
    is_active: bool
    is_ethernet: bool
    lid: int
    mtu: int
    gids: tuple[Gid, ...]

    @property
    def mtu_bytes(self) -> int:
        """Payload of one packet (bytes)."""
        return 128 << self.mtu


@dataclass(frozen=True, slots=True)
class DeviceChoice:
    """What the operator asks for; `None` leaves it to us."""

    device: str | None = None
    port: int | None = None
    gid_index: int | None = None

    @classmethod
    def parse(cls, text: str) -> DeviceChoice:
        """Read `NAME[:PORT[:GID_INDEX]]`; the empty text chooses nothing. `ValueError` says what is wrong."""
        if not text:
            return cls()
        name, *numbers = text.split(":")
        if not name or len(numbers) > 2 or not all(number.isdecimal() for number in numbers):
            raise ValueError(f"{text!r} is no NAME[:PORT[:GID_INDEX]]")
        port, gid_index = [*map(int, numbers), None, None][:2]
        return cls(name, port, gid_index)

    def __str__(self) -> str:
        """As it was written."""
        return (
            ":".join(str(part) for part in (self.device, self.port, self.gid_index) if part is not None) or "any device"
        )


@dataclass(frozen=True, slots=True)
class Link:
    """The chosen device, port and GID. `gid` is `None` on InfiniBand without a global route."""

    device: str
    port: int
    is_ethernet: bool
    lid: int
    mtu: int
    gid: Gid | None

    def __str__(self) -> str:
        """For logs."""
        return f"{self.device} port {self.port}" + (f" GID {self.gid.index} ({self.gid.text})" if self.gid else "")


def choose_link(ports: list[PortFacts], choice: DeviceChoice) -> Link | str:
    """The first active port that fits, with its best GID; a text says why there is none, and what to do."""
    if not ports:
        return "no RDMA device here: load its driver (for soft-RoCE: rdma link add rxe0 type rxe netdev IFACE)"
    wanted = [facts for facts in ports if choice.device in (None, facts.device) and choice.port in (None, facts.port)]
    if not wanted:
        return f"{choice} is not among {_names(ports)}"
    active = [facts for facts in wanted if facts.is_active]
    if not active:
        return f"no active port: {', '.join(f'{facts.device}:{facts.port} is {facts.state}' for facts in wanted)}; bring its link up"
    links = [link for link in (_link(facts, choice.gid_index) for facts in active) if link is not None]
    return links[0] if links else f"no usable GID on {_names(active)}: give the network interface an IP address"


def rank(gid: Gid) -> int:
    """How well a GID serves on Ethernet; the lowest is best. RoCE v1 cannot be routed and is often filtered."""
    if gid.type is not GidType.ROCE_V2:
        return 3
    if gid.is_ipv4:
        return 0
    return 2 if gid.gid.startswith(_LINK_LOCAL) else 1


def _link(facts: PortFacts, gid_index: int | None) -> Link | None:
    gids = [gid for gid in facts.gids if any(gid.gid) and gid_index in (None, gid.index)]
    if facts.is_ethernet or gid_index is not None:
        if not gids:
            return None
        gid = min(gids, key=lambda gid: (rank(gid), gid.index))
        return Link(facts.device, facts.port, facts.is_ethernet, facts.lid, facts.mtu, gid)
    return Link(facts.device, facts.port, facts.is_ethernet, facts.lid, facts.mtu, None)


def _names(ports: list[PortFacts]) -> str:
    return ", ".join(f"{facts.device}:{facts.port}" for facts in ports)
