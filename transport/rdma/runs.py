"""Frames that wait in neighbouring slots, taken together: one write of a run costs the device and both loops what one frame costs.

Never: does I/O.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from transport.contract import RingGeometry


@dataclass(frozen=True, slots=True)
class Run:
    """Frames `first` to `first + num_frames - 1`: `num_bytes` from `offset` on, in both rings alike."""

    first: int
    num_frames: int
    offset: int
    num_bytes: int


def take_run(waiting: deque[tuple[int, int]], geometry: RingGeometry, max_run_bytes: int) -> Run:
    """Take the longest run off the front of (number, num_bytes), at least one frame.

    A frame that does not fill its slot ends a run, since the receiver counts frames by the length alone; so does the end of the ring.
    """
    first, last_bytes = waiting.popleft()
    slot = first % geometry.num_slots
    num_frames = 1
    while (
        waiting
        and last_bytes == geometry.slot_bytes
        and slot + num_frames < geometry.num_slots
        and num_frames * geometry.slot_bytes + waiting[0][1] <= max_run_bytes
    ):
        number, last_bytes = waiting.popleft()
        assert number == first + num_frames, f"frame {number} waits behind {first + num_frames - 1}"
        num_frames += 1
    num_bytes = (num_frames - 1) * geometry.slot_bytes + last_bytes
    return Run(first, num_frames, slot * geometry.slot_bytes, num_bytes)
