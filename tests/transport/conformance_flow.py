"""Frames, credits and cancelling: what every transport owes while both ends live."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from tests.transport.channels import ChannelMaker, content, receive, receive_all, send, send_all
from transport.contract import Departure, RingGeometry, Slot


class FlowConformance(ChannelMaker):
    """Frames, credits and cancelling: what every transport owes while both ends live."""

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
                await asyncio.wait([fifth], timeout=2 * self.quick.probe_s)
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
