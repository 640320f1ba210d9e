"""The tcp transport keeps the contract."""

from __future__ import annotations

import asyncio

import pytest

from tests.transport.channels import BOUND_S, SMALL, receive, send
from tests.transport.conformance import ChannelConformance
from transport.contract import Transport
from transport.errors import TransportRefused
from transport.limits import Limits
from transport.tcp import TcpTransport
from transport.tcp.wire import Answer, unpack_answer


class TestTcpConformance(ChannelConformance):
    def make_transports(self, limits: Limits) -> tuple[Transport, Transport]:
        return TcpTransport("a secret", limits=limits), TcpTransport("a secret", limits=limits)


def test_the_landing_side_is_told_the_advertised_host_and_connects_to_it() -> None:
    async def test() -> None:
        sending, receiving = TcpTransport("a secret", advertise="localhost"), TcpTransport("a secret")
        landing = await receiving.open_landing(SMALL)
        departure, answer = await sending.open_departure(SMALL, landing.offer)
        told = unpack_answer(answer)
        assert isinstance(told, Answer)
        assert told.host == "localhost"
        await landing.establish(answer)
        await departure.ready()
        await send(departure, 0, 256)
        await receive(landing, 0, 256)
        for end in (landing, departure, sending, receiving):
            await end.close()

    asyncio.run(asyncio.wait_for(test(), BOUND_S))


@pytest.mark.parametrize("name", ["n\u00f6de", "x" * 256])
def test_a_host_that_no_answer_can_carry_is_refused(name: str) -> None:
    with pytest.raises(TransportRefused, match="no host"):
        TcpTransport("a secret", advertise=name)
