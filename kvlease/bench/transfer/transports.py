"""The transport that is measured: the servers' own choice, and `memory`, whose two ends are in one process.

Never: falls back from the transport that was named.
"""

from __future__ import annotations

from kvlease.peering.transports import choose_transport
from transport.contract import Transport
from transport.limits import Limits
from transport.memory import MemoryHub, MemoryTransport
from transport.tcp.transport import TcpTransport

MEMORY = "memory"
#: Both ends are in this process and must meet in one hub.
_HUB = MemoryHub()


#: A measurement may meet a machine that is busy with something else: then a stall is a figure, and no death.
_PATIENT = Limits(establish_s=30.0, death_s=30.0)


def measured_transport(name: str, secret: str, host: str) -> Transport:
    """The transport of that name; raises `TransportRefused`."""
    match name:
        case _ if name == MEMORY:
            return MemoryTransport(_HUB)
        case "tcp":
            return TcpTransport(secret, host, _PATIENT)
        case _:
            return choose_transport(name, secret, host)
