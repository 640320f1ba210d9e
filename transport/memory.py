"""The memory transport: both ends of a channel in one process, joined by a wire that can play faults from a seed.

A `MemoryHub` is the network; channels are numbered in the order in which their landing ends are opened, and each draws
its faults from a generator of its own, so that channels do not disturb each other and a seed gives the same faults again.

Never: hides from a test which faults it plays: they are all in the hub's `FaultPlan`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from transport.contract import ChannelStatistics, RingGeometry, Slot
from transport.ends import ReceiveSide, SendSide
from transport.errors import TransportRefused
from transport.faulty_wire import FaultPlan, FaultyWire
from transport.limits import Limits

__all__ = ["FaultPlan", "MemoryDeparture", "MemoryHub", "MemoryLanding", "MemoryTransport"]


@dataclass(slots=True)
class MemoryHub:
    """The network that memory transports share."""

    plan: FaultPlan = field(default_factory=FaultPlan)
    limits: Limits = field(default_factory=Limits)
    num_channels: int = 0
    landings: dict[bytes, MemoryLanding] = field(default_factory=dict)
    departures: dict[bytes, MemoryDeparture] = field(default_factory=dict)


class MemoryTransport:
    """Makes channels whose two ends must be made by transports of one hub."""

    def __init__(self, hub: MemoryHub) -> None:
        """Use this hub."""
        self._hub = hub
        self._is_closed = False

    @property
    def name(self) -> str:
        """`memory`."""
        return "memory"

    async def open_landing(self, geometry: RingGeometry) -> MemoryLanding:
        """Allocate a landing ring."""
        self._check_open()
        self._hub.num_channels += 1
        landing = MemoryLanding(geometry, self._hub, b"memory channel %d" % self._hub.num_channels)
        self._hub.landings[landing.offer] = landing
        return landing

    async def open_departure(self, geometry: RingGeometry, offer: bytes) -> tuple[MemoryDeparture, bytes]:
        """Allocate a departure ring for an offer of this hub; the answer is the offer again."""
        self._check_open()
        landing = self._hub.landings.get(offer)
        if landing is None or offer in self._hub.departures:
            raise TransportRefused(f"{offer!r} is no memory offer of this hub, or was used")
        if landing.geometry != geometry:
            raise TransportRefused(f"the landing side has {landing.geometry}, this side {geometry}")
        departure = MemoryDeparture(geometry, self._hub, offer)
        self._hub.departures[offer] = departure
        return departure, offer

    async def close(self) -> None:
        """No new channels. Idempotent."""
        self._is_closed = True

    def _check_open(self) -> None:
        if self._is_closed:
            raise TransportRefused("the memory transport was closed")


class MemoryDeparture:
    """The sending end."""

    def __init__(self, geometry: RingGeometry, hub: MemoryHub, offer: bytes) -> None:
        """Wait for the landing side, at most `Limits.establish_s`."""
        self.side = SendSide(geometry)
        self.wire: FaultyWire | None = None
        self._hub = hub
        self._offer = offer
        establish_s = hub.limits.establish_s
        reason = f"memory departure: the landing side did not connect within {establish_s:g} s"
        self.deadline = asyncio.get_running_loop().call_later(establish_s, self.side.state.break_off, reason)

    async def ready(self) -> None:
        """Wait until the landing side is connected."""
        await self.side.ready()

    async def reserve(self) -> Slot:
        """Wait for a credit and lend the next slot."""
        return await self.side.reserve()

    def send(self, slot: Slot, num_bytes: int) -> None:
        """Put a copy of the slot on the wire."""
        payload = self.side.send(slot, num_bytes)
        assert self.wire is not None, "slots are lent only when connected"
        self.wire.send(bytes(payload))

    def give_back(self, slot: Slot) -> None:
        """Return the lent slot unsent."""
        self.side.give_back(slot)

    def statistics(self) -> ChannelStatistics:
        """Frames and bytes sent, credits that came back."""
        return self.side.statistics()

    async def close(self) -> None:
        """End the channel."""
        self.deadline.cancel()
        self.side.close()
        self._hub.departures.pop(self._offer, None)
        if self.wire is not None:
            self.wire.departure_closed()


class MemoryLanding:
    """The receiving end."""

    def __init__(self, geometry: RingGeometry, hub: MemoryHub, offer: bytes) -> None:
        """Map the ring."""
        self.side = ReceiveSide(geometry)
        self.geometry = geometry
        self.wire: FaultyWire | None = None
        self._hub = hub
        self._offer = offer

    @property
    def offer(self) -> bytes:
        """The name of the channel in its hub."""
        return self._offer

    async def establish(self, answer: bytes) -> None:
        """Join the departure end that answered."""
        self.side.state.check()
        assert self.wire is None, "a landing end is established once"
        departure = self._hub.departures.get(answer)
        if answer != self._offer or departure is None or not departure.side.state.is_open:
            self.side.state.break_off("memory landing: establish: the departure side is not there")
            self.side.state.check()
            return
        departure.deadline.cancel()
        self.wire = departure.wire = FaultyWire(
            departure.side, self.side, self._hub.plan, self._hub.limits, self._offer
        )
        departure.side.connect()

    async def receive(self) -> Slot:
        """Wait for the next frame."""
        return await self.side.receive()

    def release(self, slot: Slot) -> None:
        """Give the slot back as a credit."""
        if self.side.release(slot) and self.wire is not None:
            self.wire.released()

    def statistics(self) -> ChannelStatistics:
        """Frames and bytes that arrived whole, credits given."""
        return self.side.statistics()

    async def close(self) -> None:
        """End the channel."""
        self.side.close()
        self._hub.landings.pop(self._offer, None)
        if self.wire is not None:
            self.wire.landing_closed()
