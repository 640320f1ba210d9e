"""The contract of a block channel as tests: every transport's test module derives a class from `ChannelConformance`.

The obligations are those of `transport/contract.py`. A test sees a channel through the contract alone; how the two transports are
made, and how many there are, is the one thing that the derived class says.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from transport.contract import Departure, Landing, RingGeometry, Slot, Transport
from transport.errors import ChannelBroken
from transport.limits import Limits

SMALL = RingGeometry(slot_bytes=256, num_slots=4)
BOUND_S = 20.0


@dataclass(frozen=True, slots=True)
class Channel:
    """Both ends of a connected channel."""

    departure: Departure
    landing: Landing


def content(number: int, num_bytes: int) -> bytes:
    """Bytes that no other frame has."""
    return Random(number).randbytes(num_bytes)


async def send(departure: Departure, number: int, num_bytes: int) -> None:
    """Reserve, fill and send one frame."""
    slot = await departure.reserve()
    slot.memory[:num_bytes] = content(number, num_bytes)
    departure.send(slot, num_bytes)


async def receive(landing: Landing, number: int, num_bytes: int) -> Slot:
    """Receive one frame and check that it is this one, whole."""
    slot = await landing.receive()
    assert (slot.sequence_number, slot.num_bytes) == (number, num_bytes)
    assert bytes(slot.memory[:num_bytes]) == content(number, num_bytes)
    return slot


async def until(is_so: Callable[[], bool], bound_s: float = 5.0) -> None:
    """Wait for a fact; fail if it does not come true."""
    async with asyncio.timeout(bound_s):
        while not is_so():  # noqa: ASYNC110 - the contract has no event for what is asked here
            await asyncio.sleep(0.001)


async def broken_within(waiting: Awaitable[object], bound_s: float) -> str:
    """The message of the `ChannelBroken` that this ends with, in time."""
    with pytest.raises(ChannelBroken) as caught:
        async with asyncio.timeout(bound_s):
            await waiting
    return str(caught.value)


class ChannelMaker:
    """Each test states one obligation.

    `quick`: the limits of most tests; `tight`: so short a `death_s` that a living channel is soon older than many of it; `patience`: the
    tests' bounds are so many times what is promised. A transport on an emulated machine needs all three larger.
    """

    quick = Limits(establish_s=1.0, death_s=0.6, probe_s=0.1)
    tight = Limits(establish_s=1.0, death_s=0.15, probe_s=0.03)
    patience = 1.0

    @property
    def death_bound_s(self) -> float:
        """By then a death must be known (seconds)."""
        return self.quick.death_s * self.patience

    def make_transports(self, limits: Limits) -> tuple[Transport, Transport]:
        """The transport of the departure side and that of the landing side; they may be one."""
        raise NotImplementedError

    def run(self, test: Coroutine[Any, Any, None]) -> None:
        """Run one test in a loop of its own, in bounded time."""

        async def bounded() -> None:
            async with asyncio.timeout(BOUND_S):
                await test

        asyncio.run(bounded())

    @asynccontextmanager
    async def transports(self, limits: Limits | None = None) -> AsyncIterator[tuple[Transport, Transport]]:
        """Both transports, closed at the end."""
        source, target = self.make_transports(limits or self.quick)
        try:
            yield source, target
        finally:
            await source.close()
            await target.close()

    async def connect(
        self, stack: AsyncExitStack, ends: tuple[Transport, Transport], geometry: RingGeometry = SMALL
    ) -> Channel:
        """A connected channel, closed with the stack."""
        landing = await ends[1].open_landing(geometry)
        stack.push_async_callback(landing.close)
        departure, answer = await ends[0].open_departure(geometry, landing.offer)
        stack.push_async_callback(departure.close)
        await landing.establish(answer)
        await departure.ready()
        return Channel(departure, landing)

    @asynccontextmanager
    async def channel(self, geometry: RingGeometry = SMALL, limits: Limits | None = None) -> AsyncIterator[Channel]:
        """One connected channel."""
        async with self.transports(limits) as ends, AsyncExitStack() as stack:
            yield await self.connect(stack, ends, geometry)

    # ------------------------------------------------------------------------------------------ order, wholeness, laps


async def send_all(departure: Departure, num_frames: int, random: Random) -> None:
    """Send small frames with pauses."""
    for number in range(num_frames):
        for _ in range(random.randint(0, 2)):
            await asyncio.sleep(0)
        await send(departure, number, 64)


async def receive_all(landing: Landing, num_frames: int, random: Random) -> None:
    """Receive and release small frames with pauses."""
    for number in range(num_frames):
        slot = await receive(landing, number, 64)
        for _ in range(random.randint(0, 2)):
            await asyncio.sleep(0)
        landing.release(slot)


async def send_to_each(channels: list[Channel], number: int) -> None:
    """Send a frame of its own over each channel, then receive each."""
    for index, channel in enumerate(channels):
        slot = await channel.departure.reserve()
        slot.memory[:32] = content(100 * number + index, 32)
        channel.departure.send(slot, 32)
    for index, channel in reversed(list(enumerate(channels))):
        slot = await channel.landing.receive()
        assert slot.sequence_number == number
        assert bytes(slot.memory[:32]) == content(100 * number + index, 32)
        channel.landing.release(slot)


async def send_until_broken(departure: Departure, num_bytes: int) -> None:
    """Send whole slots until the channel breaks."""

    async def send_forever() -> None:
        while True:
            departure.send(await departure.reserve(), num_bytes)

    with pytest.raises(ChannelBroken):
        await send_forever()
