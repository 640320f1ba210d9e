"""How an end of a channel knows that its peer lives: ticks without a movement are counted, not seconds since the last byte.

A process that was itself stopped for a while wakes up to one late tick and reads what waited for it before it counts another one.

Never: reads a clock or sets a timer.
"""

from __future__ import annotations

from transport.limits import Limits

#: Silence is measured twice as finely as life is shown, so that what is left of `death_s` is not lost to rounding.
TICKS_PER_PROBE = 2


def tick_s(limits: Limits) -> float:
    """Time between two ticks (seconds)."""
    return limits.probe_s / TICKS_PER_PROBE


def max_still_ticks(limits: Limits) -> int:
    """So many ticks without a movement are a death. A tick comes up to one late for the byte before it, and one more is left for a busy host."""
    return int(limits.death_s / tick_s(limits)) - 2


class Watch:
    """Counts for how many ticks in a row nothing moved."""

    def __init__(self) -> None:
        """Nothing moved yet."""
        self.num_moved = 0
        self._num_seen = 0
        self._num_still = 0

    def still_for(self) -> int:
        """Called once a tick: how many ticks it has been still, this one included."""
        self._num_still = 0 if self.num_moved != self._num_seen else self._num_still + 1
        self._num_seen = self.num_moved
        return self._num_still

    def reset(self) -> None:
        """Begin again: stillness is all right now."""
        self._num_still = 0
        self._num_seen = self.num_moved
