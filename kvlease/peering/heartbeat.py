"""Both sides of a pair show that they live, and watch the other do so.

A beat carries the engine's pulse. A peer is lost when no beat comes for `stall_s`, or when it says that it is busy and its
pulse has stood still for as long: a stopped process and a stuck engine look alike to those who wait for them.

Never: decides what a loss means; it raises `PairLost`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from kvlease.handoff.limits import Limits
from kvlease.peering.errors import PairLost


@dataclass(frozen=True, slots=True)
class Beat:
    """What one beat says: a number that grows with progress, and whether there is work to progress with."""

    pulse: int
    is_busy: bool


async def show_life(own: Callable[[], Beat], send: Callable[[Beat], Awaitable[None]], limits: Limits) -> None:
    """Send a beat every `heartbeat_s`, for ever."""
    while True:
        await send(own())
        await asyncio.sleep(limits.heartbeat_s)


class LifeSigns:
    """What is known of the peer's progress."""

    def __init__(self) -> None:
        """It progressed just now: pairing is progress."""
        self.pulse = -1  # as the last beat said
        self.progressed_s = time.monotonic()

    def note(self, beat: Beat) -> None:
        """A beat arrived."""
        if beat.pulse != self.pulse or not beat.is_busy:
            self.pulse, self.progressed_s = beat.pulse, time.monotonic()

    def still_for_s(self) -> float:
        """Seconds since the last progress."""
        return time.monotonic() - self.progressed_s

    async def watch(self, receive: Callable[[], Awaitable[Beat]], limits: Limits) -> None:
        """Take beats until the peer is lost; raises `PairLost`."""
        while True:
            try:
                async with asyncio.timeout(limits.stall_s):
                    beat = await receive()
            except TimeoutError:
                raise PairLost(f"no sign of life for {limits.stall_s} s") from None
            self.note(beat)
            if self.still_for_s() > limits.stall_s:
                raise PairLost(f"busy, but without progress for {limits.stall_s} s")
