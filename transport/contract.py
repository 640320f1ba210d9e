"""The contract of a block channel: an ordered, exactly-once, back-pressured way from a departure ring to a landing ring.

One channel joins one prefill server (the departure side) to one decode server (the landing side). Both ends hold a ring of
`num_slots` slots of `slot_bytes` each; slot `k % num_slots` carries the k-th frame. The sender may fill a slot only when it
holds a credit for it; the receiver gives credits back, in order, as it empties slots.

Obligations that the conformance suite (`tests/transport/conformance.py`) holds every implementation to:

* frames arrive in order, each exactly once, and only whole frames are seen;
* a sender without credit waits; it never overwrites a slot that the receiver has not released;
* the death of either end is a `ChannelBroken` at the other within `Limits.death_s`, never silence;
* after `close` has returned no byte lands in that end's ring any more, and only then is the ring's memory given back;
* bytes never land outside the ring, whatever a peer sends;
* `close` may be called twice, and at any moment, also while another task waits in `reserve` or `receive`: that task then gets `ChannelClosed`.

Never: knows what a token or a tensor is, or logs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol


@dataclass(frozen=True, slots=True)
class RingGeometry:
    """The size of both rings of a channel; the two ends must agree on it (bytes, count)."""

    slot_bytes: int
    num_slots: int

    def __post_init__(self) -> None:
        """Refuse a ring that could not carry one frame."""
        if self.slot_bytes <= 0 or self.slot_bytes % 64 or self.num_slots <= 0:
            raise ValueError(f"a ring needs slots of a positive multiple of 64 bytes, got {self}")

    @property
    def ring_bytes(self) -> int:
        """Memory of one ring (bytes)."""
        return self.slot_bytes * self.num_slots


class Slot(NamedTuple):
    """One slot of a ring, on loan: `memory` is the whole slot; on the landing side `num_bytes` of it were written."""

    sequence_number: int
    memory: memoryview
    num_bytes: int


@dataclass(frozen=True, slots=True)
class ChannelStatistics:
    """Counters of one end since it was opened."""

    num_frames: int
    num_bytes: int
    num_credits: int


class Departure(Protocol):
    """The sending end."""

    async def ready(self) -> None:
        """Wait until the landing end is connected; `ChannelBroken` after `Limits.establish_s`."""

    async def reserve(self) -> Slot:
        """Wait for a credit and lend the next slot to be filled. One slot is lent at a time."""

    def send(self, slot: Slot, num_bytes: int) -> None:
        """Send the first `num_bytes` of the lent slot. Does not wait. The memory is the transport's again."""

    def give_back(self, slot: Slot) -> None:
        """Return the lent slot unsent; the next `reserve` lends it again."""

    def statistics(self) -> ChannelStatistics:
        """What went through."""

    async def close(self) -> None:
        """End the channel."""


class Landing(Protocol):
    """The receiving end."""

    @property
    def offer(self) -> bytes:
        """What the departure side needs to know, opaque to everybody but the transport of the same name."""

    async def establish(self, answer: bytes) -> None:
        """Complete the connection with the departure side's answer; `ChannelBroken` if it cannot be had in time."""

    async def receive(self) -> Slot:
        """Wait for the next frame, in order. Several may be held at once."""

    def release(self, slot: Slot) -> None:
        """Give the slot back to the sender as a credit; slots are released in the order they were received."""

    def statistics(self) -> ChannelStatistics:
        """What came through."""

    async def close(self) -> None:
        """End the channel."""


class Transport(Protocol):
    """A way to make channels. Shared by all channels of a server; `close` ends what they share."""

    @property
    def name(self) -> str:
        """`tcp`, `rdma` or `memory`: both ends of a channel must be made by transports of one name."""

    async def open_landing(self, geometry: RingGeometry) -> Landing:
        """Allocate a landing ring, ready to be offered."""

    async def open_departure(self, geometry: RingGeometry, offer: bytes) -> tuple[Departure, bytes]:
        """Allocate a departure ring for an offer; returns it with the answer that the landing side must `establish`."""

    async def close(self) -> None:
        """Release what the channels shared (a listener, a device). Idempotent."""
