"""Thousands of closes against writes in flight, on a loaded machine with an RDMA device: not one late byte. Run by `scripts/prove`.

The number of races is `RACES` (2,000 unless told). The seed of each is its number, so a failure names what to run again.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

from tests.rdma.parts import fill
from transport.contract import Departure, Landing, RingGeometry, Transport
from transport.errors import ChannelBroken, ChannelClosed
from transport.limits import Limits
from transport.rdma import DeviceChoice, open_rdma

NUM_RACES = int(os.environ.get("RACES", "2000"))
GEOMETRY = RingGeometry(64 << 10, 4)
LIMITS = Limits(establish_s=20.0, death_s=20.0, probe_s=2.0)
AFTER = b"\xa5" * GEOMETRY.slot_bytes


@contextmanager
def load(num_processes: int) -> Iterator[None]:
    """Keep the cores busy, so that packets wait in queues."""
    busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(num_processes)]
    try:
        yield
    finally:
        for process in busy:
            process.kill()
            process.wait()


async def send_for_ever(departure: Departure) -> None:
    """Until the channel breaks, or is closed."""
    try:
        while True:
            slot = await departure.reserve()
            slot.memory[:] = fill(slot.sequence_number)
            departure.send(slot, GEOMETRY.slot_bytes)
    except (ChannelBroken, ChannelClosed):
        return


async def race(transport: Transport, seed: int) -> list[memoryview]:
    """Close the landing side at some moment of a transfer and at once use its ring's memory for something else; returns that memory."""
    random = Random(seed)
    landing: Landing = await transport.open_landing(GEOMETRY)
    departure, answer = await transport.open_departure(GEOMETRY, landing.offer)
    await landing.establish(answer)
    await departure.ready()
    sending = asyncio.create_task(send_for_ever(departure))
    views = []
    for _ in range(GEOMETRY.num_slots):
        slot = await landing.receive()
        views.append(slot.memory)
        landing.release(slot)
    await asyncio.sleep(random.uniform(0, 0.02))
    await landing.close()
    for view in views:
        view[:] = AFTER
    await asyncio.sleep(random.choice([0, 0.001, 0.01]))
    assert all(view == AFTER for view in views), f"race {seed}: a late byte"
    await departure.close()
    await sending
    return views


def test_no_byte_lands_after_close_in_thousands_of_races() -> None:
    async def test() -> None:
        transport = open_rdma(DeviceChoice(), LIMITS)
        before: list[memoryview] = []
        for seed in range(NUM_RACES):
            views = await race(transport, seed)
            assert all(view == AFTER for view in before), f"race {seed - 1}: a byte landed during the next race"
            before = views
        await transport.close()

    with load(2):
        asyncio.run(test())
    print(f"figures: {NUM_RACES} closes against writes in flight, 0 late bytes")
