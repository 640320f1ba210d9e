"""The memory transport keeps the contract without faults, and plays the faults of its plan."""

from __future__ import annotations

from tests.transport.conformance import ChannelConformance
from transport.contract import Transport
from transport.limits import Limits
from transport.memory import MemoryHub, MemoryTransport


class TestMemoryConformance(ChannelConformance):
    def make_transports(self, limits: Limits) -> tuple[Transport, Transport]:
        hub = MemoryHub(limits=limits)
        return MemoryTransport(hub), MemoryTransport(hub)
