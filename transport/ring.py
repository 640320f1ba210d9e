"""A channel's ring: its memory, and the counts that say whose each slot is.

A slot of the departure ring changes owner along this line, and the counts of `SendWindow` are its borders:

    credited | transmitted, at the peer | sent, waiting for the network | lent to the owner | free
             ^ num_credited             ^ num_transmitted               ^ num_sent          ^ num_sent + is_lent

A slot of the landing ring (`ReceiveWindow`):

    released | lent to the owner | arrived, waiting | the peer's to fill
             ^ num_released      ^ num_taken        ^ num_arrived

Never: awaits, reads a clock, or touches a socket.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass

from transport.contract import RingGeometry
from transport.errors import TransportRefused


class Ring:
    """Private page-aligned memory of one ring, zeroed.

    A slot that somebody still holds keeps the memory mapped after `give_back`: a thread that is reading a slot while its
    channel is closed reads old bytes, never freed ones.
    """

    def __init__(self, geometry: RingGeometry) -> None:
        """Map the memory; `TransportRefused` if the host has too little."""
        try:
            memory = mmap.mmap(-1, geometry.ring_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise TransportRefused(f"mmap of a ring of {geometry.ring_bytes} bytes: {error}") from error
        self.geometry = geometry
        self._memory: memoryview | None = memoryview(memory)

    @property
    def memory(self) -> memoryview:
        """The whole ring, for a transport that hands its address to a device."""
        assert self._memory is not None, "the ring was given back"
        return self._memory

    def slot(self, sequence_number: int) -> memoryview:
        """The whole slot that carries the frame of this number (`slot_bytes` bytes)."""
        start = sequence_number % self.geometry.num_slots * self.geometry.slot_bytes
        return self.memory[start : start + self.geometry.slot_bytes]

    def give_back(self) -> None:
        """Let go of the memory; the last holder of a slot unmaps it. Idempotent."""
        self._memory = None


@dataclass(slots=True)
class SendWindow:
    """Which frames the departure side may still send. Counts are totals since the channel was opened."""

    num_slots: int
    num_sent: int = 0
    num_transmitted: int = 0
    num_credited: int = 0
    is_lent: bool = False

    def can_lend(self) -> bool:
        """Is the next slot free, and no other one lent?"""
        return not self.is_lent and self.num_sent - self.num_credited < self.num_slots

    def lend(self) -> int:
        """Lend the next slot; returns the number of the frame it will carry."""
        assert self.can_lend(), f"no slot to lend: {self}"
        self.is_lent = True
        return self.num_sent

    def take_back(self, sequence_number: int) -> None:
        """The lent slot came back unsent."""
        assert self.is_lent, f"no slot is lent: {self}"
        assert sequence_number == self.num_sent, f"slot {sequence_number} is not the lent one: {self}"
        self.is_lent = False

    def send(self, sequence_number: int) -> None:
        """The lent slot came back filled."""
        self.take_back(sequence_number)
        self.num_sent += 1

    def transmit(self, num_transmitted: int) -> None:
        """So many frames have wholly left the departure ring (a total)."""
        assert self.num_transmitted <= num_transmitted <= self.num_sent, f"{num_transmitted} transmitted: {self}"
        self.num_transmitted = num_transmitted

    def credit(self, num_credited: int) -> str | None:
        """The peer says how many frames it released (a total); returns what is wrong with that, if anything."""
        if num_credited < self.num_credited:
            return f"credits went back from {self.num_credited} to {num_credited}"
        if num_credited > self.num_transmitted:
            return f"credit for {num_credited} frames, but only {self.num_transmitted} were sent"
        self.num_credited = num_credited
        return None


@dataclass(slots=True)
class ReceiveWindow:
    """Which frame may come next, and which slots the owner holds. Counts are totals since the channel was opened."""

    num_slots: int
    num_arrived: int = 0
    num_taken: int = 0
    num_released: int = 0

    def refusal(self, sequence_number: int) -> str | None:
        """Why a frame of this number may not be placed now (`None`: it may)."""
        if sequence_number != self.num_arrived:
            return f"frame {sequence_number} came where frame {self.num_arrived} was due"
        if not self.has_room():
            return f"frame {sequence_number} came without a credit"
        return None

    def has_room(self) -> bool:
        """Is the next slot the peer's to fill?"""
        return self.num_arrived - self.num_released < self.num_slots

    def arrive(self) -> None:
        """The next frame is whole in its slot."""
        assert self.has_room(), f"a frame landed in an unreleased slot: {self}"
        self.num_arrived += 1

    def can_take(self) -> bool:
        """Has a frame arrived that the owner has not got yet?"""
        return self.num_taken < self.num_arrived

    def take(self) -> int:
        """Lend the next arrived frame to the owner; returns its number."""
        assert self.can_take(), f"no frame to take: {self}"
        self.num_taken += 1
        return self.num_taken - 1

    def release(self, sequence_number: int) -> None:
        """The owner is done with this slot; slots come back in order."""
        assert sequence_number == self.num_released < self.num_taken, f"slot {sequence_number} is not next: {self}"
        self.num_released += 1
