"""Which transport is chosen, and that it is said. This machine has no RDMA device, or `tests/rdma` would have it."""

from __future__ import annotations

import asyncio
import logging

import pytest

from kvlease.peering.transports import ChosenTransport, TransportChoice, choose_transport
from tests.rdma.machine import has_rdma_device
from transport.errors import TransportRefused

without_device = pytest.mark.skipif(has_rdma_device(), reason="this machine has an RDMA device")


def choose(name: str, rdma_device: str = "") -> ChosenTransport:
    async def chosen() -> ChosenTransport:
        found = await choose_transport(TransportChoice(name, "127.0.0.1", rdma_device=rdma_device), "a secret")
        await found.transport.close()
        return found

    return asyncio.run(chosen())


@without_device
def test_rdma_by_name_is_refused_with_advice() -> None:
    with pytest.raises(TransportRefused, match="rdma link add|python3-pyverbs"):
        choose("rdma")


@without_device
def test_auto_is_tcp_where_there_is_no_device_and_says_why(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    chosen = choose("auto")
    assert chosen.transport.name == "tcp"
    assert "rdma cannot be had" in chosen.account
    (record,) = [record for record in caplog.records if record.message == "transport.chosen"]
    assert record.__dict__["transport"] == "tcp"
    assert record.__dict__["account"] == chosen.account


def test_tcp_by_name_asks_no_device() -> None:
    assert choose("tcp").account == "tcp, as asked"


def test_an_unknown_transport_or_a_malformed_device_is_refused() -> None:
    with pytest.raises(TransportRefused, match="pigeon"):
        choose("pigeon")
    with pytest.raises(TransportRefused, match="--rdma-device: ':1' is no NAME"):
        choose("rdma", ":1")
