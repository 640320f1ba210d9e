"""Doubles around a real transport that spoil what passes: the faults of hardware, of networks and of our own bugs.

Never: reaches into a server; it sees only what a transport sees.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvlease.kvcache.seal import SEAL_BYTES, Seal
from transport.contract import ChannelStatistics, Departure, Landing, RingGeometry, Slot, Transport

#: Changes a sealed block (a copy) that is about to leave; None: it does not leave at all. Gets the block's number on its channel.
Tamper = Callable[[int, bytearray], bytearray | None]


class TamperedDeparture:
    """A departure end whose frames pass a `Tamper` first."""

    def __init__(self, inner: Departure, tamper: Tamper) -> None:
        self._inner, self._tamper, self._number = inner, tamper, 0

    async def ready(self) -> None:
        await self._inner.ready()

    async def reserve(self) -> Slot:
        return await self._inner.reserve()

    def send(self, slot: Slot, num_bytes: int) -> None:
        block = self._tamper(self._number, bytearray(slot.memory[:num_bytes]))
        self._number += 1
        if block is None:
            self._inner.give_back(slot)
            return
        slot.memory[: len(block)] = block
        self._inner.send(slot, len(block))

    def give_back(self, slot: Slot) -> None:
        self._inner.give_back(slot)

    def statistics(self) -> ChannelStatistics:
        return self._inner.statistics()

    async def close(self) -> None:
        await self._inner.close()


class StrayLanding:
    """A landing end into whose slots somebody writes between arrival and verification."""

    def __init__(self, inner: Landing, stray: Tamper) -> None:
        self._inner, self._stray, self._number = inner, stray, 0

    @property
    def offer(self) -> bytes:
        return self._inner.offer

    async def establish(self, answer: bytes) -> None:
        await self._inner.establish(answer)

    async def receive(self) -> Slot:
        slot = await self._inner.receive()
        block = self._stray(self._number, bytearray(slot.memory[: slot.num_bytes]))
        self._number += 1
        assert block is not None, "a stray write cannot take a block away"
        slot.memory[: slot.num_bytes] = block
        return slot

    def release(self, slot: Slot) -> None:
        self._inner.release(slot)

    def statistics(self) -> ChannelStatistics:
        return self._inner.statistics()

    async def close(self) -> None:
        await self._inner.close()


class TamperedTransport:
    """Makes channels whose ends are doubles."""

    def __init__(self, inner: Transport, tamper: Tamper) -> None:
        self._inner, self._tamper = inner, tamper

    @property
    def name(self) -> str:
        return self._inner.name

    async def open_landing(self, geometry: RingGeometry) -> Landing:
        return StrayLanding(await self._inner.open_landing(geometry), self._tamper)

    async def open_departure(self, geometry: RingGeometry, offer: bytes) -> tuple[Departure, bytes]:
        departure, answer = await self._inner.open_departure(geometry, offer)
        return TamperedDeparture(departure, self._tamper), answer

    async def close(self) -> None:
        await self._inner.close()


def resealed(block: bytearray, **fields: object) -> bytearray:
    """The block under a valid seal with other fields: what a bug of ours, not of the network, would send."""
    seal = Seal.unpack(block)
    assert isinstance(seal, Seal)
    block[:SEAL_BYTES] = replace(seal, **fields).pack()  # type: ignore[arg-type]
    return block
