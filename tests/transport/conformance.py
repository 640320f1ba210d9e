"""The contract of a block channel as tests: every transport's test module derives a class from `ChannelConformance`.

The obligations are those of `transport/contract.py`. A test sees a channel through the contract alone; how the two transports are
made, and how many there are, is the one thing that the derived class says.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from transport.contract import Departure, Landing, RingGeometry, Slot, Transport
from transport.errors import ChannelBroken, ChannelClosed, TransportRefused
from transport.limits import Limits

QUICK = Limits(establish_s=1.0, death_s=0.6, probe_s=0.1)
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


class ChannelConformance:
    """Each test states one obligation."""

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
    async def transports(self, limits: Limits = QUICK) -> AsyncIterator[tuple[Transport, Transport]]:
        """Both transports, closed at the end."""
        source, target = self.make_transports(limits)
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
    async def channel(self, geometry: RingGeometry = SMALL, limits: Limits = QUICK) -> AsyncIterator[Channel]:
        """One connected channel."""
        async with self.transports(limits) as ends, AsyncExitStack() as stack:
            yield await self.connect(stack, ends, geometry)

    # ------------------------------------------------------------------------------------------ order, wholeness, laps

    @pytest.mark.parametrize("slow", ["neither", "sender", "receiver"])
    @pytest.mark.parametrize("num_slots", [1, 3, 8])
    def test_frames_of_any_length_arrive_in_order_once_and_whole_over_many_laps(
        self, num_slots: int, slow: str
    ) -> None:
        async def test() -> None:
            random = Random(num_slots)
            lengths = [
                random.choice([1, 63, 64, 65, 4095, 4096, random.randint(1, 4096)]) for _ in range(num_slots * 20)
            ]

            async def sender(departure: Departure) -> None:
                for number, num_bytes in enumerate(lengths):
                    if slow == "sender":
                        await asyncio.sleep(random.uniform(0, 0.002))
                    await send(departure, number, num_bytes)

            async with self.channel(RingGeometry(4096, num_slots)) as channel, asyncio.TaskGroup() as group:
                group.create_task(sender(channel.departure))
                for number, num_bytes in enumerate(lengths):
                    slot = await receive(channel.landing, number, num_bytes)
                    if slow == "receiver":
                        await asyncio.sleep(random.uniform(0, 0.002))
                    assert bytes(slot.memory[:num_bytes]) == content(number, num_bytes)
                    channel.landing.release(slot)

        self.run(test())

    def test_large_frames_arrive_whole(self) -> None:
        async def test() -> None:
            geometry = RingGeometry(3 << 20, 2)
            async with self.channel(geometry) as channel, asyncio.TaskGroup() as group:
                for number in range(5):
                    group.create_task(send(channel.departure, number, geometry.slot_bytes - number))
                    channel.landing.release(await receive(channel.landing, number, geometry.slot_bytes - number))

        self.run(test())

    def test_bytes_behind_a_short_frame_are_not_written(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                await send(channel.departure, 0, 100)
                slot = await receive(channel.landing, 0, 100)
                assert bytes(slot.memory[100:]) == bytes(156)

        self.run(test())

    # ---------------------------------------------------------------------------------------------------- back-pressure

    def test_a_sender_without_credit_waits_and_no_unreleased_slot_is_written(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                for number in range(4):
                    await send(channel.departure, number, 256)
                held = [await receive(channel.landing, number, 256) for number in range(4)]
                fifth = asyncio.create_task(send(channel.departure, 4, 256))
                await asyncio.wait([fifth], timeout=2 * QUICK.probe_s)
                assert not fifth.done()
                assert [bytes(slot.memory) for slot in held] == [content(number, 256) for number in range(4)]
                channel.landing.release(held[0])
                await fifth
                held[0] = await receive(channel.landing, 4, 256)
                assert [bytes(slot.memory) for slot in held] == [content(number, 256) for number in (4, 1, 2, 3)]

        self.run(test())

    def test_slots_held_through_other_traffic_keep_their_bytes(self) -> None:
        async def test() -> None:
            async with self.channel(RingGeometry(256, 5)) as channel:
                held: list[Slot] = []
                for number in range(60):
                    await send(channel.departure, number, 256)
                    held.append(await receive(channel.landing, number, 256))
                    assert all(bytes(slot.memory) == content(slot.sequence_number, 256) for slot in held)
                    if len(held) == 4:
                        channel.landing.release(held.pop(0))

        self.run(test())

    def test_one_slot_is_lent_at_a_time(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                slot = await channel.departure.reserve()
                second = asyncio.create_task(channel.departure.reserve())
                await asyncio.sleep(0)
                assert not second.done()
                channel.departure.send(slot, 1)
                assert (await second).sequence_number == 1

        self.run(test())

    def test_a_slot_given_back_is_lent_again_and_sends_nothing(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                for _ in range(9):
                    slot = await channel.departure.reserve()
                    slot.memory[:] = bytes(256)
                    assert slot.sequence_number == 0
                    channel.departure.give_back(slot)
                await send(channel.departure, 0, 256)
                await receive(channel.landing, 0, 256)
                assert channel.landing.statistics().num_frames == 1

        self.run(test())

    @pytest.mark.parametrize("order", [[1], [0, 0], [0, 2]])
    def test_a_release_out_of_order_is_an_assertion_error(self, order: list[int]) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                for number in range(3):
                    await send(channel.departure, number, 8)
                slots = [await receive(channel.landing, number, 8) for number in range(3)]
                for number in order[:-1]:
                    channel.landing.release(slots[number])
                with pytest.raises(AssertionError):
                    channel.landing.release(slots[order[-1]])

        self.run(test())

    @pytest.mark.parametrize("num_bytes", [0, -1, 257])
    def test_a_frame_longer_than_its_slot_or_empty_is_an_assertion_error(self, num_bytes: int) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                slot = await channel.departure.reserve()
                with pytest.raises(AssertionError):
                    channel.departure.send(slot, num_bytes)

        self.run(test())

    def test_a_slot_cannot_be_sent_twice(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                slot = await channel.departure.reserve()
                channel.departure.send(slot, 8)
                with pytest.raises(AssertionError):
                    channel.departure.send(slot, 8)

        self.run(test())

    # --------------------------------------------------------------------------------------------------------- cancelling

    def test_a_cancelled_receive_loses_no_frame(self) -> None:
        async def test() -> None:
            async with self.channel() as channel, asyncio.TaskGroup() as group:
                random = Random(1)
                group.create_task(send_all(channel.departure, 200, random))
                number = 0
                while number < 200:
                    receiving = asyncio.create_task(channel.landing.receive())
                    for _ in range(random.randint(0, 3)):
                        await asyncio.sleep(0)
                    receiving.cancel()
                    await asyncio.wait([receiving])
                    if not receiving.cancelled():
                        assert receiving.result().sequence_number == number
                        assert bytes(receiving.result().memory[:64]) == content(number, 64)
                        channel.landing.release(receiving.result())
                        number += 1

        self.run(test())

    def test_a_cancelled_reserve_loses_no_credit(self) -> None:
        async def test() -> None:
            async with self.channel() as channel, asyncio.TaskGroup() as group:
                random = Random(2)
                group.create_task(receive_all(channel.landing, 200, random))
                number = 0
                while number < 200:
                    reserving = asyncio.create_task(channel.departure.reserve())
                    for _ in range(random.randint(0, 3)):
                        await asyncio.sleep(0)
                    reserving.cancel()
                    await asyncio.wait([reserving])
                    if not reserving.cancelled():
                        slot = reserving.result()
                        slot.memory[:64] = content(number, 64)
                        channel.departure.send(slot, 64)
                        number += 1

        self.run(test())

    # -------------------------------------------------------------------------------------------------------------- close

    def test_close_may_be_called_twice_and_at_once(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                for end in (channel.departure, channel.landing):
                    await asyncio.gather(end.close(), end.close())
                    await end.close()

        self.run(test())

    def test_close_of_ends_that_were_never_connected(self) -> None:
        async def test() -> None:
            async with self.transports() as (source, target):
                landing = await target.open_landing(SMALL)
                departure, answer = await source.open_departure(SMALL, landing.offer)
                readying = asyncio.create_task(departure.ready())
                receiving = asyncio.create_task(landing.receive())
                await asyncio.sleep(0)
                await departure.close()
                await landing.close()
                for waiting in (readying, receiving):
                    with pytest.raises(ChannelClosed):
                        await waiting
                with pytest.raises(ChannelClosed):
                    await landing.establish(answer)

        self.run(test())

    def test_whoever_waits_while_its_end_is_closed_gets_channel_closed(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                for number in range(4):
                    await send(channel.departure, number, 1)
                for number in range(4):
                    await receive(channel.landing, number, 1)
                reserving = [asyncio.create_task(channel.departure.reserve()) for _ in range(2)]
                receiving = [asyncio.create_task(channel.landing.receive()) for _ in range(2)]
                await asyncio.sleep(0)
                await channel.departure.close()
                await channel.landing.close()
                for waiting in (*reserving, *receiving):
                    with pytest.raises(ChannelClosed):
                        await waiting

        self.run(test())

    def test_every_call_after_close_says_so_and_handing_back_is_harmless(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                await send(channel.departure, 0, 8)
                taken = await receive(channel.landing, 0, 8)
                await send(channel.departure, 1, 8)
                lent = await channel.departure.reserve()
                await until(lambda: channel.landing.statistics().num_frames == 2)
                await channel.departure.close()
                await channel.landing.close()
                with pytest.raises(ChannelClosed):
                    channel.departure.send(lent, 8)
                channel.departure.give_back(lent)
                channel.landing.release(taken)
                for call in (channel.departure.ready, channel.departure.reserve, channel.landing.receive):
                    with pytest.raises(ChannelClosed):
                        await call()
                assert channel.landing.statistics().num_frames == 2

        self.run(test())

    def test_a_slot_held_over_close_can_still_be_read(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                await send(channel.departure, 0, 256)
                slot = await receive(channel.landing, 0, 256)
                await channel.landing.close()
                assert bytes(slot.memory) == content(0, 256)

        self.run(test())

    @pytest.mark.parametrize("seed", range(8))
    def test_no_byte_lands_after_close_has_returned(self, seed: int) -> None:
        async def test() -> None:
            geometry = RingGeometry(256 << 10, 4)
            async with self.channel(geometry) as channel:
                random = Random(seed)
                sending = asyncio.create_task(send_until_broken(channel.departure, geometry.slot_bytes))
                views: list[memoryview] = []
                for _ in range(4):
                    slot = await channel.landing.receive()
                    views.append(slot.memory)
                    channel.landing.release(slot)
                for _ in range(random.randint(0, 20)):
                    await asyncio.sleep(0)
                await channel.landing.close()
                for view in views:
                    view[:] = b"\xa5" * geometry.slot_bytes
                await sending
                await asyncio.sleep(0.01)  # nothing may happen in it, so there is no fact to wait for
                assert all(view.tobytes() == b"\xa5" * geometry.slot_bytes for view in views)

        self.run(test())

    # -------------------------------------------------------------------------------------------------------------- death

    def test_the_close_of_the_departure_end_is_a_broken_channel_at_the_landing_end(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                receiving = asyncio.create_task(channel.landing.receive())
                await asyncio.sleep(0)
                await channel.departure.close()
                assert "landing" in await broken_within(receiving, QUICK.death_s)
                await broken_within(channel.landing.receive(), QUICK.death_s)

        self.run(test())

    def test_the_close_of_the_landing_end_is_a_broken_channel_at_the_departure_end(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                for number in range(4):
                    await send(channel.departure, number, 8)
                reserving = asyncio.create_task(channel.departure.reserve())
                await asyncio.sleep(0)
                await channel.landing.close()
                assert "departure" in await broken_within(reserving, QUICK.death_s)
                await broken_within(channel.departure.ready(), QUICK.death_s)

        self.run(test())

    def test_a_lent_slot_cannot_be_sent_on_a_broken_channel(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                slot = await channel.departure.reserve()
                waiting = asyncio.create_task(channel.departure.reserve())
                await channel.landing.close()
                await broken_within(waiting, QUICK.death_s)
                with pytest.raises(ChannelBroken):
                    channel.departure.send(slot, 8)
                channel.departure.give_back(slot)

        self.run(test())

    def test_frames_that_arrived_before_a_break_are_still_received(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                for number in range(3):
                    await send(channel.departure, number, 8)
                await until(lambda: channel.landing.statistics().num_frames == 3)
                await channel.departure.close()
                for number in range(3):
                    channel.landing.release(await receive(channel.landing, number, 8))
                await broken_within(channel.landing.receive(), QUICK.death_s)

        self.run(test())

    def test_an_idle_channel_outlives_many_times_death_s(self) -> None:
        async def test() -> None:
            limits = Limits(establish_s=1.0, death_s=0.15, probe_s=0.03)
            async with self.channel(limits=limits) as channel:
                receiving = asyncio.create_task(channel.landing.receive())
                await asyncio.wait([receiving], timeout=4 * limits.death_s)
                await send(channel.departure, 0, 8)
                assert (await receiving).sequence_number == 0

        self.run(test())

    def test_a_full_ring_at_a_slow_owner_is_no_death(self) -> None:
        async def test() -> None:
            limits = Limits(establish_s=1.0, death_s=0.15, probe_s=0.03)
            geometry = RingGeometry(1 << 20, 4)
            async with self.channel(geometry, limits) as channel:
                for number in range(4):
                    await send(channel.departure, number, geometry.slot_bytes)
                fifth = asyncio.create_task(send(channel.departure, 4, 8))
                await asyncio.wait([fifth], timeout=4 * limits.death_s)
                channel.landing.release(await receive(channel.landing, 0, geometry.slot_bytes))
                await fifth

        self.run(test())

    # ------------------------------------------------------------------------------------------------- offers and answers

    def test_rings_of_different_geometry_are_refused_naming_both(self) -> None:
        async def test() -> None:
            async with self.transports() as (source, target):
                landing = await target.open_landing(SMALL)
                with pytest.raises(TransportRefused) as caught:
                    await source.open_departure(RingGeometry(512, 4), landing.offer)
                assert "slot_bytes=256" in str(caught.value)
                assert "slot_bytes=512" in str(caught.value)
                await landing.close()

        self.run(test())

    @pytest.mark.parametrize("offer", [b"", b"x", bytes(50), bytes(1000)])
    def test_foreign_bytes_are_no_offer(self, offer: bytes) -> None:
        async def test() -> None:
            async with self.transports() as (source, _):
                with pytest.raises(TransportRefused):
                    await source.open_departure(SMALL, offer)

        self.run(test())

    @pytest.mark.parametrize("answer", [b"", b"x", bytes(41), bytes(1000)])
    def test_foreign_bytes_are_no_answer(self, answer: bytes) -> None:
        async def test() -> None:
            async with self.transports() as (_, target):
                landing = await target.open_landing(SMALL)
                await broken_within(landing.establish(answer), QUICK.establish_s)
                await broken_within(landing.receive(), QUICK.establish_s)
                await landing.close()

        self.run(test())

    def test_a_departure_end_that_nobody_connects_to_is_broken_in_time(self) -> None:
        async def test() -> None:
            limits = Limits(establish_s=0.1)
            async with self.transports(limits) as (source, target):
                landing = await target.open_landing(SMALL)
                departure, answer = await source.open_departure(SMALL, landing.offer)
                reserving = asyncio.create_task(departure.reserve())
                await broken_within(departure.ready(), 1.0)
                await broken_within(reserving, 1.0)
                await broken_within(landing.establish(answer), 1.0)
                await departure.close()
                await landing.close()

        self.run(test())

    def test_a_closed_transport_opens_nothing_and_closes_again(self) -> None:
        async def test() -> None:
            async with self.transports() as (source, target):
                landing = await target.open_landing(SMALL)
                await source.close()
                await target.close()
                with pytest.raises(TransportRefused):
                    await source.open_departure(SMALL, landing.offer)
                with pytest.raises(TransportRefused):
                    await target.open_landing(SMALL)
                await landing.close()

        self.run(test())

    # -------------------------------------------------------------------------------- independence, counting, cleanliness

    def test_channels_of_one_transport_are_independent(self) -> None:
        async def test() -> None:
            async with self.transports() as ends, AsyncExitStack() as stack:
                channels = [await self.connect(stack, ends) for _ in range(3)]
                await send_to_each(channels, 0)
                await channels[1].landing.close()
                async with asyncio.timeout(QUICK.death_s):
                    await send_until_broken(channels[1].departure, 32)
                for number in range(1, 10):
                    await send_to_each([channels[0], channels[2]], number)

        self.run(test())

    def test_statistics_count_frames_bytes_and_credits(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                for number in range(6):
                    await send(channel.departure, number, 10 + number)
                    slot = await receive(channel.landing, number, 10 + number)
                    if number < 5:
                        channel.landing.release(slot)
                await until(lambda: channel.departure.statistics().num_credits == 5)
                for end in (channel.departure, channel.landing):
                    statistics = end.statistics()
                    assert (statistics.num_frames, statistics.num_bytes, statistics.num_credits) == (6, 75, 5)

        self.run(test())

    def test_closing_leaves_no_thread_task_or_descriptor(self) -> None:
        async def test() -> None:
            async with self.channel():
                pass
            before = (threading.active_count(), len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")))  # noqa: PTH208
            for _ in range(5):
                async with self.channel() as channel:
                    await send(channel.departure, 0, 8)
                    await receive(channel.landing, 0, 8)
            assert before == (threading.active_count(), len(asyncio.all_tasks()), len(os.listdir("/proc/self/fd")))  # noqa: PTH208

        self.run(test())


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
