"""The two ends of a channel as their owners see them, without the network between: loans, waiting, and how an end ends.

Every transport puts its own way of moving bytes beneath a `SendSide` or a `ReceiveSide`, so that waiting, cancelling,
closing and breaking are the same for all. For one event loop; nothing here may be called from another thread.

Never: moves a byte, or knows which transport it serves.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import TypeVar

from transport.contract import ChannelStatistics, RingGeometry, Slot
from transport.errors import ChannelBroken, ChannelClosed, TransportError
from transport.ring import ReceiveWindow, Ring, SendWindow

Taken = TypeVar("Taken")


class EndState:
    """Open, broken or closed; and the tasks that wait for a change. The first reason of a break is kept."""

    def __init__(self) -> None:
        """A new end is open."""
        self.is_closed = False
        self.break_reason: str | None = None
        self._waiters: dict[asyncio.Future[None], None] = {}

    @property
    def is_open(self) -> bool:
        """Neither closed nor broken."""
        return not self.is_closed and self.break_reason is None

    def error(self) -> TransportError | None:
        """What a call on this end has to raise now."""
        if self.is_closed:
            return ChannelClosed("this end of the channel was closed")
        return None if self.break_reason is None else ChannelBroken(self.break_reason)

    def check(self) -> None:
        """Raise `ChannelClosed` or `ChannelBroken` unless the end is open."""
        error = self.error()
        if error is not None:
            raise error

    def break_off(self, reason: str) -> None:
        """The channel is lost; later reasons are ignored."""
        if self.is_open:
            self.break_reason = reason
            self.wake()

    def close(self) -> None:
        """The owner ends it. Idempotent."""
        self.is_closed = True
        self.wake()

    def wake(self) -> None:
        """Let every waiting task look again."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()

    async def take(self, attempt: Callable[[], Taken | None]) -> Taken:
        """Wait until `attempt` gives something; what it gives before a break is still given, never after a close.

        Nothing is awaited after a successful attempt: a task that is cancelled has taken nothing.
        """
        while True:
            taken = None if self.is_closed else attempt()
            if taken is not None:
                return taken
            self.check()
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            finally:
                self._waiters.pop(waiter, None)


class SendSide:
    """The departure ring and its loans. Slots are lent only once the landing side is connected."""

    def __init__(self, geometry: RingGeometry) -> None:
        """Map the ring; `TransportRefused` if it cannot be had."""
        self.state = EndState()
        self.window = SendWindow(geometry.num_slots)
        self._ring = Ring(geometry)
        self._num_bytes = 0
        self._is_connected = False

    @property
    def memory(self) -> memoryview:
        """The whole ring."""
        return self._ring.memory

    def connect(self) -> None:
        """The landing side is there."""
        self._is_connected = True
        self.state.wake()

    async def ready(self) -> None:
        """Wait for `connect`."""
        await self.state.take(lambda: True if self._is_connected and self.state.is_open else None)

    async def reserve(self) -> Slot:
        """Wait for a credit and lend the next slot."""
        slot = self._lend()  # without a coroutine where one is there
        return slot if slot is not None else await self.state.take(self._lend)

    def send(self, slot: Slot, num_bytes: int) -> memoryview:
        """Take the lent slot back filled; returns the bytes to be sent. Raises if the end is not open."""
        assert 0 < num_bytes <= len(slot.memory), f"{num_bytes} bytes in a slot of {len(slot.memory)}"
        self.state.check()
        self.window.send(slot.sequence_number)
        self._num_bytes += num_bytes
        self.state.wake()
        return slot.memory[:num_bytes]

    def give_back(self, slot: Slot) -> None:
        """Take the lent slot back unsent; nothing happens at an end that is over."""
        if self.state.is_open:
            self.window.take_back(slot.sequence_number)
            self.state.wake()

    def credit(self, num_credited: int) -> str | None:
        """The peer's total of released frames; returns what is wrong with it, if anything."""
        fault = self.window.credit(num_credited)
        if fault is None:
            self.state.wake()
        return fault

    def statistics(self) -> ChannelStatistics:
        """Frames and bytes sent, credits that came back."""
        return ChannelStatistics(self.window.num_sent, self._num_bytes, self.window.num_credited)

    def close(self) -> None:
        """End it and give the ring back. Only after the transport has let go of the ring. Idempotent."""
        self.state.close()
        self._ring.give_back()

    def _lend(self) -> Slot | None:
        if not (self._is_connected and self.state.is_open and self.window.can_lend()):
            return None
        sequence_number = self.window.lend()
        return Slot(sequence_number, self._ring.slot(sequence_number), 0)


class ReceiveSide:
    """The landing ring and its loans. Frames that were whole before a break are still received."""

    def __init__(self, geometry: RingGeometry) -> None:
        """Map the ring; `TransportRefused` if it cannot be had."""
        self.state = EndState()
        self.window = ReceiveWindow(geometry.num_slots)
        self._ring = Ring(geometry)
        self._num_bytes = 0
        self._waiting_bytes: deque[int] = deque()

    @property
    def memory(self) -> memoryview:
        """The whole ring."""
        return self._ring.memory

    def refusal(self, sequence_number: int, num_bytes: int) -> str | None:
        """Why a frame of this number and length may not be placed (`None`: it may)."""
        slot_bytes = self._ring.geometry.slot_bytes
        if not 0 < num_bytes <= slot_bytes:
            return f"frame {sequence_number} of {num_bytes} bytes for slots of {slot_bytes}"
        return self.window.refusal(sequence_number)

    def target(self) -> memoryview:
        """The slot of the next frame to arrive; only for a frame that was not refused."""
        assert self.window.has_room(), f"the next slot is not free: {self.window}"
        return self._ring.slot(self.window.num_arrived)

    def arrive(self, num_bytes: int) -> None:
        """The next frame is whole in its slot."""
        self.window.arrive()
        self._num_bytes += num_bytes
        self._waiting_bytes.append(num_bytes)
        self.state.wake()

    async def receive(self) -> Slot:
        """Wait for the next frame."""
        slot = self._take()  # without a coroutine where one is there
        return slot if slot is not None else await self.state.take(self._take)

    def release(self, slot: Slot) -> bool:
        """Take a slot back; returns whether the peer is still there to be told."""
        if not self.state.is_closed:
            self.window.release(slot.sequence_number)
        return self.state.is_open

    def statistics(self) -> ChannelStatistics:
        """Frames and bytes that arrived whole, credits given."""
        return ChannelStatistics(self.window.num_arrived, self._num_bytes, self.window.num_released)

    def close(self) -> None:
        """End it and give the ring back. Only after the transport has let go of the ring. Idempotent."""
        self.state.close()
        self._ring.give_back()

    def _take(self) -> Slot | None:
        if self.state.is_closed or not self.window.can_take():
            return None
        sequence_number = self.window.take()
        return Slot(sequence_number, self._ring.slot(sequence_number), self._waiting_bytes.popleft())
