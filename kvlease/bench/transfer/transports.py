"""The transport that is measured: the servers' own choice, and `memory`, whose two ends are in one process.

Never: falls back from the transport that was named.
"""

from __future__ import annotations

from kvlease.peering.transports import choose_transport
from transport.contract import Transport
from transport.memory import MemoryHub, MemoryTransport

MEMORY = "memory"
#: Both ends are in this process and must meet in one hub.
_HUB = MemoryHub()


def measured_transport(name: str, secret: str, host: str) -> Transport:
    """The transport of that name; raises `TransportRefused`."""
    return MemoryTransport(_HUB) if name == MEMORY else choose_transport(name, secret, host)
