"""What a device must show before it carries a tenant's blocks: three facts that the safety argument stands on, on this very device.

    a block arrives        a frame crosses from one queue pair of this process to another, byte for byte
    an outsider is refused a write with the ring's key, but outside the ring, changes nothing and breaks the channel
    a close is final       no byte of the writes in flight lands after `close` has returned

Capabilities that a device reports of itself are not asked for: what is written there and what happens have been seen to differ.

Never: touches memory that it did not map.
"""

from __future__ import annotations

import asyncio
import ctypes
import mmap
import time
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace

from transport.contract import RingGeometry
from transport.errors import ChannelBroken, TransportError
from transport.rdma.channel import RdmaDeparture, RdmaLanding
from transport.rdma.transport import RdmaTransport
from transport.rdma.wire import unpack_offer

#: Each step; on hardware it takes microseconds.
_STEP_S = 10.0
_GEOMETRY = RingGeometry(64 << 10, 4)
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
        departure, landing = await _connected(transport, stack, 0)
        await _send_pattern(departure)
        slot = await landing.receive()
        return None if slot.memory == _PATTERN else "the block that arrived is not the one that was sent"


async def _outsider_is_refused(transport: RdmaTransport) -> str | None:
    outside = memoryview(mmap.mmap(-1, _GEOMETRY.ring_bytes))
    async with AsyncExitStack() as stack:
        departure, _ = await _connected(transport, stack, ctypes.addressof(ctypes.c_char.from_buffer(outside)))
        try:
            while True:
                await _send_pattern(departure)
        except ChannelBroken:
            pass
        return None if not any(outside) else "a write outside the ring changed memory"


async def _close_is_final(transport: RdmaTransport) -> str | None:
    async with AsyncExitStack() as stack:
        departure, landing = await _connected(transport, stack, 0)
        views = []
        for _ in range(_GEOMETRY.num_slots):
            await _send_pattern(departure)
            slot = await landing.receive()
            views.append(slot.memory)
            landing.release(slot)
        for _ in range(_GEOMETRY.num_slots):
            await _send_pattern(departure)
        await asyncio.sleep(0)  # the writes are on their way
        await landing.close()
        for view in views:
            view[:] = _AFTER * len(view)
        await asyncio.sleep(_QUIET_S)
        is_unchanged = all(view == _AFTER * len(view) for view in views)
        return None if is_unchanged else "a byte landed after the ring was closed"


_STEPS: tuple[tuple[str, Callable[[RdmaTransport], Awaitable[str | None]]], ...] = (
    ("a block arrives whole", _block_arrives),
    ("a write outside the ring is refused", _outsider_is_refused),
    ("no byte lands after close", _close_is_final),
)


async def _connected(
    transport: RdmaTransport, stack: AsyncExitStack, address: int
) -> tuple[RdmaDeparture, RdmaLanding]:
    """Both ends of a channel; `address`: where the departure side is told that the ring lies (0: where it does)."""
    landing = await transport.open_landing(_GEOMETRY)
    stack.push_async_callback(landing.close)
    offer = unpack_offer(landing.offer)
    assert not isinstance(offer, str), f"our own offer: {offer}"
    told = replace(offer, ring_address=address or offer.ring_address)
    departure, answer = await transport.open_departure(_GEOMETRY, told.pack())
    stack.push_async_callback(departure.close)
    await landing.establish(answer)
    await departure.ready()
    return departure, landing


async def _send_pattern(departure: RdmaDeparture) -> None:
    slot = await departure.reserve()
    slot.memory[:] = _PATTERN
    departure.send(slot, len(_PATTERN))
