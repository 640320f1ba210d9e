"""Closing, death and refusal: what every transport owes when something ends."""

from __future__ import annotations

import asyncio
import os
import threading
from contextlib import AsyncExitStack
from random import Random

import pytest

from tests.transport.channels import (
    SMALL,
    ChannelMaker,
    broken_within,
    content,
    receive,
    send,
    send_to_each,
    send_until_broken,
    until,
)
from transport.contract import RingGeometry
from transport.errors import ChannelBroken, ChannelClosed, TransportRefused
from transport.limits import Limits


class EndConformance(ChannelMaker):
    """Closing, death and refusal: what every transport owes when something ends."""

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
                assert "landing" in await broken_within(receiving, self.death_bound_s)
                await broken_within(channel.landing.receive(), self.death_bound_s)

        self.run(test())

    def test_the_close_of_the_landing_end_is_a_broken_channel_at_the_departure_end(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                for number in range(4):
                    await send(channel.departure, number, 8)
                reserving = asyncio.create_task(channel.departure.reserve())
                await asyncio.sleep(0)
                await channel.landing.close()
                assert "departure" in await broken_within(reserving, self.death_bound_s)
                await broken_within(channel.departure.ready(), self.death_bound_s)

        self.run(test())

    def test_a_lent_slot_cannot_be_sent_on_a_broken_channel(self) -> None:
        async def test() -> None:
            async with self.channel() as channel:
                slot = await channel.departure.reserve()
                waiting = asyncio.create_task(channel.departure.reserve())
                await channel.landing.close()
                await broken_within(waiting, self.death_bound_s)
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
                await broken_within(channel.landing.receive(), self.death_bound_s)

        self.run(test())

    def test_an_idle_channel_outlives_many_times_death_s(self) -> None:
        async def test() -> None:
            limits = self.tight
            async with self.channel(limits=limits) as channel:
                receiving = asyncio.create_task(channel.landing.receive())
                await asyncio.wait([receiving], timeout=4 * limits.death_s)
                await send(channel.departure, 0, 8)
                assert (await receiving).sequence_number == 0

        self.run(test())

    def test_a_full_ring_at_a_slow_owner_is_no_death(self) -> None:
        async def test() -> None:
            limits = self.tight
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
                await broken_within(landing.establish(answer), self.quick.establish_s * self.patience)
                await broken_within(landing.receive(), self.quick.establish_s * self.patience)
                await landing.close()

        self.run(test())

    def test_a_departure_end_that_nobody_connects_to_is_broken_in_time(self) -> None:
        async def test() -> None:
            limits = Limits(establish_s=0.1)
            async with self.transports(limits) as (source, target):
                landing = await target.open_landing(SMALL)
                departure, answer = await source.open_departure(SMALL, landing.offer)
                reserving = asyncio.create_task(departure.reserve())
                await broken_within(departure.ready(), self.patience)
                await broken_within(reserving, self.patience)
                await broken_within(landing.establish(answer), self.patience)
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
                async with asyncio.timeout(self.death_bound_s):
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
