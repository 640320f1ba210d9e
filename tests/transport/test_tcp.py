"""The tcp transport keeps the contract."""

from __future__ import annotations

from tests.transport.conformance import ChannelConformance
from transport.contract import Transport
from transport.limits import Limits
from transport.tcp import TcpTransport


class TestTcpConformance(ChannelConformance):
    def make_transports(self, limits: Limits) -> tuple[Transport, Transport]:
        return TcpTransport("a secret", limits=limits), TcpTransport("a secret", limits=limits)
