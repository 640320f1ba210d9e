"""One end of an rdma channel in a process of its own, so that it can be stopped or killed.

python -m tests.rdma.peer landing     prints its offer, reads an answer, then prints the number of each frame it received and released
python -m tests.rdma.peer departure   reads an offer, prints its answer, then sends frames as fast as it can
"""

from __future__ import annotations

import asyncio
import sys

from tests.rdma.parts import GEOMETRY, SLOW, fill
from transport.rdma import DeviceChoice, open_rdma


def say(text: str) -> None:
    """One line, at once."""
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


async def land() -> None:
    """Receive for ever."""
    landing = await open_rdma(DeviceChoice(), SLOW).open_landing(GEOMETRY)
    say(landing.offer.hex())
    await landing.establish(bytes.fromhex(sys.stdin.readline()))
    say("ready")
    while True:
        slot = await landing.receive()
        expected = fill(slot.sequence_number)
        assert slot.memory == expected, f"frame {slot.sequence_number} is spoiled"
        landing.release(slot)
        say(str(slot.sequence_number))


async def depart() -> None:
    """Send for ever."""
    offer = bytes.fromhex(sys.stdin.readline())
    departure, answer = await open_rdma(DeviceChoice(), SLOW).open_departure(GEOMETRY, offer)
    say(answer.hex())
    await departure.ready()
    say("ready")
    while True:
        slot = await departure.reserve()
        slot.memory[:] = fill(slot.sequence_number)
        departure.send(slot, GEOMETRY.slot_bytes)


if __name__ == "__main__":
    asyncio.run(land() if sys.argv[1] == "landing" else depart())
