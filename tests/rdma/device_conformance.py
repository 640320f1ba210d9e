"""The rdma transport keeps the contract, on a real device. Run where there is one: in the guest, by `tests/rdma/test_guest.py`."""

from __future__ import annotations

from tests.transport.conformance import ChannelConformance
from transport.contract import Transport
from transport.limits import Limits
from transport.rdma import DeviceChoice, open_rdma


class TestRdmaConformance(ChannelConformance):
    # The guest is emulated, and its host may be busy: the limits of production, and bounds that are looser still.
    quick = Limits()
    tight = Limits(establish_s=5.0, death_s=0.9, probe_s=0.1)
    patience = 4.0

    def make_transports(self, limits: Limits) -> tuple[Transport, Transport]:
        return open_rdma(DeviceChoice(), limits), open_rdma(DeviceChoice(), limits)
