"""One conformance suite for every transport: `transport.contract`, obligation by obligation."""

from __future__ import annotations

from tests.transport.conformance_ends import EndConformance
from tests.transport.conformance_flow import FlowConformance


class ChannelConformance(FlowConformance, EndConformance):
    """Subclass it with a `transports` that makes the two sides."""
