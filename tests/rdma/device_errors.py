"""What the rdma transport does when a peer lies, dies or stands still, on a real device. Run by `tests/rdma/test_guest.py` in the guest."""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import signal
import time
from collections.abc import AsyncIterator, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from kvlease.peering.transports import TransportChoice, choose_transport
from tests.rdma.machine import device_counter
from tests.rdma.parts import BOUND_S, GEOMETRY, PATIENCE, SLOW, Peer, fill, peer
from transport.contract import Departure, Landing, RingGeometry, Transport
from transport.errors import ChannelBroken, TransportRefused
from transport.limits import Limits
from transport.rdma import DeviceChoice, open_rdma, usable_link, verbs
from transport.rdma.channel import RdmaDeparture
from transport.rdma.connection import Connection, Plan
from transport.rdma.wire import CREDIT, Message, Offer, unpack_answer, unpack_offer


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(2 * BOUND_S):
            await test

    asyncio.run(bounded())


@asynccontextmanager
async def transport(limits: Limits = SLOW) -> AsyncIterator[Transport]:
    opened = open_rdma(DeviceChoice(), limits)
    try:
        yield opened
    finally:
        await opened.close()


async def connected(
    stack: AsyncExitStack, source: Transport, target: Transport, **lie: int
) -> tuple[Departure, Landing]:
    """A channel; `lie` replaces fields of the offer that the departure side is told."""
    landing = await target.open_landing(GEOMETRY)
    stack.push_async_callback(landing.close)
    offer = unpack_offer(landing.offer)
    assert isinstance(offer, Offer)
    departure, answer = await source.open_departure(GEOMETRY, replace(offer, **lie).pack())  # type: ignore[arg-type]
    stack.push_async_callback(departure.close)
    await landing.establish(answer)
    await departure.ready()
    return departure, landing


async def send(departure: Departure, number: int) -> None:
    slot = await departure.reserve()
    slot.memory[:] = fill(number)
    departure.send(slot, GEOMETRY.slot_bytes)


async def broken(departure: Departure) -> str:
    """Send until the channel breaks; the reason."""

    async def send_for_ever() -> None:
        while True:
            await send(departure, 0)

    with pytest.raises(ChannelBroken) as caught:
        await send_for_ever()
    return str(caught.value)


async def fill_the_ring(departure: Departure) -> None:
    """Send until no credit is left, and wait for one."""
    for number in range(1000):
        await send(departure, number)


async def receive_for_ever(landing: Landing) -> None:
    while True:
        slot = await landing.receive()
        assert slot.memory == fill(slot.sequence_number), "a torn frame was given out"
        landing.release(slot)


async def works(departure: Departure, landing: Landing, number: int) -> None:
    await send(departure, number)
    slot = await landing.receive()
    assert slot.memory == fill(number)
    landing.release(slot)


def test_a_forged_key_opens_nothing_and_hurts_no_other_channel() -> None:
    async def test() -> None:
        async with transport() as ours, AsyncExitStack() as stack:
            good = await connected(stack, ours, ours)
            other = await ours.open_landing(GEOMETRY)
            stack.push_async_callback(other.close)
            other_offer = unpack_offer(other.offer)
            assert isinstance(other_offer, Offer)
            # The key of another pair's ring, at its true address: another protection domain.
            bad, landing = await connected(
                stack, ours, ours, ring_key=other_offer.ring_key, ring_address=other_offer.ring_address
            )
            assert "REM_ACCESS_ERR" in await broken(bad)
            with pytest.raises(ChannelBroken):
                await landing.receive()
            for number in range(9):
                await works(*good, number)

    run(test())


@pytest.mark.parametrize("offset", [0, 1 << 12, (1 << 16) - 64])
def test_a_write_outside_the_ring_changes_nothing(offset: int) -> None:
    async def test() -> None:
        outside = memoryview(mmap.mmap(-1, 2 * GEOMETRY.ring_bytes))
        address = ctypes.addressof(ctypes.c_char.from_buffer(outside)) + offset
        async with transport() as ours, AsyncExitStack() as stack:
            departure, _ = await connected(stack, ours, ours, ring_address=address)
            assert "REM_ACCESS_ERR" in await broken(departure)
            assert not any(outside)

    run(test())


def test_a_peer_that_is_gone_is_reported_by_the_device_before_the_probes_miss_it() -> None:
    async def test() -> None:
        patient = replace(SLOW, death_s=12.0)
        async with transport(patient) as source, transport(patient) as target, AsyncExitStack() as stack:
            departure, landing = await connected(stack, source, target)
            await landing.close()
            assert "RETRY_EXC_ERR" in await broken(departure)

    run(test())


async def answer_of(landing_peer: Peer, source: Transport, geometry: RingGeometry = GEOMETRY) -> Departure:
    departure, answer = await source.open_departure(geometry, bytes.fromhex(await landing_peer.line()))
    landing_peer.tell(answer.hex())
    await departure.ready()
    assert await landing_peer.line() == "ready"
    return departure


def test_a_landing_side_killed_in_the_middle_of_a_write_is_noticed_in_time() -> None:
    async def test() -> None:
        async with transport(Limits(establish_s=10.0)) as source, peer("landing") as other:
            departure = await answer_of(other, source)
            for number in range(20):
                await send(departure, number)
            other.signal(signal.SIGKILL)
            killed = time.monotonic()
            await broken(departure)
            assert time.monotonic() - killed < PATIENCE * Limits().death_s
            await departure.close()

    run(test())


def test_a_departure_side_killed_in_the_middle_of_a_write_is_noticed_in_time() -> None:
    async def test() -> None:
        async with transport(Limits(establish_s=10.0)) as target, peer("departure") as other:
            landing = await target.open_landing(GEOMETRY)
            other.tell(landing.offer.hex())
            await landing.establish(bytes.fromhex(await other.line()))
            for number in range(20):
                slot = await landing.receive()
                assert slot.memory == fill(number)
                landing.release(slot)
            other.signal(signal.SIGKILL)
            killed = time.monotonic()
            with pytest.raises(ChannelBroken):
                await receive_for_ever(landing)
            assert time.monotonic() - killed < PATIENCE * Limits().death_s
            await landing.close()

    run(test())


def test_a_receiver_that_is_not_ready_delays_the_sender_and_loses_nothing() -> None:
    async def test() -> None:
        # So few receives at the peer cannot be had by its limits; its slots are few, and probes use up what is beyond them.
        limits = replace(SLOW, probe_s=0.05, death_s=8.0)
        async with transport(limits) as source, peer("landing") as other:
            departure = await answer_of(other, source)
            before = device_counter("rcvd_rnr_err")
            other.signal(signal.SIGSTOP)
            for number in range(GEOMETRY.num_slots):
                await send(departure, number)
            await until_counted("rcvd_rnr_err", before)
            other.signal(signal.SIGCONT)
            for number in range(GEOMETRY.num_slots):
                assert await other.line() == str(number)
            await departure.reserve()
            await departure.close()

    run(test())


async def until_counted(counter: str, before: int) -> None:
    async with asyncio.timeout(BOUND_S):
        while device_counter(counter) == before:  # noqa: ASYNC110 - the kernel has no event for it
            await asyncio.sleep(0.01)


def test_the_device_passes_its_self_test_and_is_chosen() -> None:
    async def test() -> None:
        for name in ("auto", "rdma"):
            chosen = await choose_transport(TransportChoice(name, "127.0.0.1"), "a secret")
            assert chosen.transport.name == "rdma"
            assert chosen.account.startswith(f"rdma on {usable_link(DeviceChoice())}, self-test passed in ")
            await chosen.transport.close()

    run(test())


def test_a_ring_beyond_the_limit_of_locked_memory_is_refused_with_advice() -> None:
    async def test() -> None:
        async with transport() as ours:
            with pytest.raises(TransportRefused, match="--ring-bytes"):
                await ours.open_landing(RingGeometry(64, 1 << 24))

    run(test())


@pytest.mark.parametrize("role", ["landing", "departure"])
def test_a_peer_that_stands_still_is_noticed_though_its_device_still_acknowledges(role: str) -> None:
    async def test() -> None:
        async with transport(Limits(establish_s=10.0)) as ours, peer(role) as other, AsyncExitStack() as stack:
            if role == "landing":
                departure = await answer_of(other, ours)
                stack.push_async_callback(departure.close)
                breaking = asyncio.create_task(fill_the_ring(departure))
            else:
                landing = await ours.open_landing(GEOMETRY)
                stack.push_async_callback(landing.close)
                other.tell(landing.offer.hex())
                await landing.establish(bytes.fromhex(await other.line()))
                breaking = asyncio.create_task(receive_for_ever(landing))
            other.signal(signal.SIGSTOP)
            stopped = time.monotonic()
            with pytest.raises(ChannelBroken, match="nothing came from the peer"):
                await breaking
            assert time.monotonic() - stopped < PATIENCE * Limits().death_s

    run(test())


def test_the_landing_side_has_no_power_over_the_departure_ring() -> None:
    async def test() -> None:
        async with transport() as ours:
            landing = await ours.open_landing(GEOMETRY)
            offer = unpack_offer(landing.offer)
            await landing.close()
            assert isinstance(offer, Offer)
            attacker = Attacker()
            device = verbs.Device(usable_link(DeviceChoice()).device)
            plan = Plan(usable_link(DeviceChoice()), num_receives=8, num_sends=4, may_be_written=True)
            forged = Connection(device, plan, attacker.ring, attacker, SLOW)
            told = replace(
                offer, queue_pair=forged.address, ring_address=forged.ring.address, ring_key=forged.ring.remote_key
            )
            departure, answer = await ours.open_departure(GEOMETRY, told.pack())
            assert isinstance(departure, RdmaDeparture)
            address = unpack_answer(answer)
            assert not isinstance(address, str)
            forged.connect(address)
            forged.message(attacker.probe())
            slot = await departure.reserve()
            slot.memory[:] = fill(0)
            target = departure.connection.ring
            attacker.ring[:] = fill(1) * GEOMETRY.num_slots
            forged.write((0, 64), (target.address, target.remote_key), 0, is_signalled=True)
            await attacker.lost.wait()
            assert "REM_" in attacker.reason
            assert slot.memory == fill(0)
            forged.close()
            await departure.close()
            device.close()

    run(test())


class Attacker:
    """Owns a connection of its own and writes where it has no business."""

    def __init__(self) -> None:
        self.ring = memoryview(mmap.mmap(-1, GEOMETRY.ring_bytes))
        self.lost = asyncio.Event()
        self.reason = ""

    def on_message(self, message: Message) -> str | None:
        return None

    def on_write(self, immediate: int, num_bytes: int) -> str | None:
        return None

    def on_written(self, num_writes: int) -> None:
        self.on_lost("the write was carried out")

    def on_turn(self) -> None:
        return

    def on_lost(self, reason: str) -> None:
        self.reason = reason
        self.lost.set()

    def probe(self) -> bytes:
        return Message(CREDIT, 0).pack()
