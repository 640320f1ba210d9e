"""What a device must show before it carries a tenant's blocks: three facts that the safety argument stands on, on this very device.

    a block arrives        a frame crosses from one queue pair of this process to another, byte for byte
    an outsider is refused a write with the ring's key, behind the ring or across its end, changes nothing there and breaks the channel
    a close is final       no byte of the writes in flight lands after `close` has returned

Capabilities that a device reports of itself are not asked for: what is written there and what happens have been seen to differ.

Never: touches memory that it did not map.
"""

from __future__ import annotations

import asyncio
import mmap
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass

from transport.contract import RingGeometry
from transport.errors import ChannelBroken, ChannelClosed, TransportError
from transport.rdma.channel import RdmaDeparture, RdmaLanding
from transport.rdma.connection import Connection, Plan
from transport.rdma.transport import RdmaTransport
from transport.rdma.wire import CREDIT, Message, Offer, unpack_answer

#: For each fact; on hardware it takes milliseconds.
_STEP_S = 30.0
#: Half a mebibyte may be in flight: a device of 100 Gbit/s needs 40 us for it, longer than a close is away.
_GEOMETRY = RingGeometry(128 << 10, 4)
_NUM_CLOSES = 4
#: Nothing may happen in it; late bytes were seen within a millisecond, where they were seen at all.
_QUIET_S = 0.02
_PATTERN = bytes(range(256)) * (_GEOMETRY.slot_bytes // 256)
_AFTER = b"\xa5"


@dataclass(frozen=True, slots=True)
class Check:
    """One fact, and what speaks against it (`None`: it was seen)."""

    fact: str
    fault: str | None
    seconds: float


async def try_device(transport: RdmaTransport) -> list[Check]:
    """Try the three facts; never raises for a device that fails them. About 50 ms on hardware, a second in an emulated machine."""
    return [await _checked(fact, step, transport) for fact, step in _STEPS]


async def _checked(
    fact: str, step: Callable[[RdmaTransport], Awaitable[str | None]], transport: RdmaTransport
) -> Check:
    started = time.monotonic()
    try:
        async with asyncio.timeout(_STEP_S):
            fault = await step(transport)
    except TransportError as error:
        fault = str(error)
    except TimeoutError:
        fault = f"nothing came within {_STEP_S:g} s"
    return Check(fact, fault, time.monotonic() - started)


async def _block_arrives(transport: RdmaTransport) -> str | None:
    async with AsyncExitStack() as stack:
        departure, landing = await _connected(transport, stack)
        await _send_pattern(departure)
        slot = await landing.receive()
        return None if slot.memory == _PATTERN else "the block that arrived is not the one that was sent"


async def _outsider_is_refused(transport: RdmaTransport) -> str | None:
    """Behind the ring, and across its end: some devices have been seen to check only where a write begins."""
    for offset in (_GEOMETRY.ring_bytes, _GEOMETRY.ring_bytes - _GEOMETRY.slot_bytes // 2):
        mapping = memoryview(mmap.mmap(-1, 2 * _GEOMETRY.ring_bytes))
        ring, outside = mapping[: _GEOMETRY.ring_bytes], mapping[_GEOMETRY.ring_bytes :]
        await _write_at(transport, ring, offset)
        if any(outside):
            return "a write outside the ring changed memory"
    return None


async def _write_at(transport: RdmaTransport, ring: memoryview, offset: int) -> None:
    """Let a departure side write so far behind the beginning of this ring, until its channel breaks."""
    plan = Plan(transport.link, num_receives=2 * _GEOMETRY.num_slots, num_sends=0, may_be_written=True)
    bystander = _Bystander()
    connection = Connection(transport.device, plan, ring, bystander, transport.limits)
    try:
        told = Offer(_GEOMETRY, connection.address, connection.ring.address + offset, connection.ring.remote_key)
        departure, answer = await transport.open_departure(_GEOMETRY, told.pack())
        try:
            address = unpack_answer(answer)
            assert not isinstance(address, str), f"our own answer: {address}"
            connection.connect(address)
            connection.message(bystander.probe())
            await departure.ready()
            await _send_until_broken(departure)
        finally:
            await departure.close()
    finally:
        connection.close()


class _Bystander:
    """Owns the landing side's connection, and lets everything happen."""

    def on_message(self, message: Message) -> str | None:
        return None

    def on_write(self, immediate: int, num_bytes: int) -> str | None:
        return None

    def on_written(self, num_writes: int) -> None:
        return

    def on_turn(self) -> None:
        return

    def on_lost(self, reason: str) -> None:
        return

    def probe(self) -> bytes:
        return Message(CREDIT, 0).pack()


async def _close_is_final(transport: RdmaTransport) -> str | None:
    """Several times, at several moments of a transfer that goes on: a ring is closed, and its memory used for something else at once."""
    for pauses in range(_NUM_CLOSES):
        async with AsyncExitStack() as stack:
            departure, landing = await _connected(transport, stack)
            views = []
            for _ in range(_GEOMETRY.num_slots):
                await _send_pattern(departure)
                slot = await landing.receive()
                views.append(slot.memory)
                landing.release(slot)
            sending = asyncio.create_task(_send_until_broken(departure))
            for _ in range(pauses + 1):
                await asyncio.sleep(0)  # writes get on their way
            await landing.close()
            for view in views:
                view[:] = _AFTER * len(view)
            await asyncio.sleep(_QUIET_S)
            is_unchanged = all(view == _AFTER * len(view) for view in views)
            await departure.close()
            await sending
        if not is_unchanged:
            return "a byte landed after the ring was closed"
    return None


async def _send_until_broken(departure: RdmaDeparture) -> None:
    with suppress(ChannelBroken, ChannelClosed):
        while True:
            await _send_pattern(departure)


_STEPS: tuple[tuple[str, Callable[[RdmaTransport], Awaitable[str | None]]], ...] = (
    ("a block arrives whole", _block_arrives),
    ("a write outside the ring is refused", _outsider_is_refused),
    ("no byte lands after close", _close_is_final),
)


async def _connected(transport: RdmaTransport, stack: AsyncExitStack) -> tuple[RdmaDeparture, RdmaLanding]:
    landing = await transport.open_landing(_GEOMETRY)
    stack.push_async_callback(landing.close)
    departure, answer = await transport.open_departure(_GEOMETRY, landing.offer)
    stack.push_async_callback(departure.close)
    await landing.establish(answer)
    await departure.ready()
    return departure, landing


async def _send_pattern(departure: RdmaDeparture) -> None:
    slot = await departure.reserve()
    slot.memory[:] = _PATTERN
    departure.send(slot, len(_PATTERN))
