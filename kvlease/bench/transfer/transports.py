"""The transport that is measured: one of the servers' own, or `memory`, whose two ends are in one process.

Never: falls back from the transport that was named.
"""

from __future__ import annotations

from transport.contract import Transport
from transport.errors import TransportRefused
from transport.limits import Limits
from transport.memory import MemoryHub, MemoryTransport
from transport.rdma import DeviceChoice, open_rdma
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
        case "rdma":
            return open_rdma(DeviceChoice(), _PATIENT)
        case _:
            raise TransportRefused(f"{name} is no transport that can be measured: tcp, rdma or memory")
