"""The wire of a memory channel, and the faults that it plays.

Frames go one way and credits the other, each in order. What happens to a frame is drawn when it is sent, from a generator that only this wire
uses. Time is the event loop's alone, so a loop with simulated time can run it.

With faults the wire lies in ways that a real transport never may (a stray write, a frame twice, a frame cut short), for the sake of
those who must not believe it. Without faults it keeps the contract of a channel.

Never: reads a wall clock, or writes outside a landing ring or into one whose `close` was called.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from random import Random

from transport.ends import ReceiveSide, SendSide
from transport.limits import Limits

_MAX_STRAY_BYTES = 64


@dataclass(frozen=True, slots=True)
class FaultPlan:
    """What goes wrong, drawn for each frame: rates are probabilities from 0 to 1, times are (least, most) in seconds."""

    seed: int = 0
    #: How long a frame or a credit is on its way.
    delay_s: tuple[float, float] = (0.0, 0.0)
    #: Foreign bytes land somewhere in the frame's slot: at once when it has arrived, before anybody can receive it ...
    stray_rate: float = 0.0
    #: ... or this much later, when its owner may be reading it or have released it; (0, 0): at once.
    stray_delay_s: tuple[float, float] = (0.0, 0.0)
    #: The frame arrives a second time, as the next one.
    duplicate_rate: float = 0.0
    #: The frame arrives with fewer bytes than were sent.
    truncate_rate: float = 0.0
    #: The connection is lost in place of the frame; both ends see it.
    break_rate: float = 0.0
    #: An end dies in place of the frame; the other one sees nothing until `Limits.death_s` is nearly over.
    departure_death_rate: float = 0.0
    landing_death_rate: float = 0.0

    def __post_init__(self) -> None:
        """Refuse what is no probability or no span of time."""
        rates = (self.stray_rate, self.duplicate_rate, self.truncate_rate, self.break_rate)
        for rate in (*rates, self.departure_death_rate, self.landing_death_rate):
            if not 0 <= rate <= 1:
                raise ValueError(f"a rate is from 0 to 1, got {rate}")
        for least, most in (self.delay_s, self.stray_delay_s):
            if not 0 <= least <= most:
                raise ValueError(f"a span of time is (least, most), got {(least, most)}")


@dataclass(frozen=True, slots=True)
class _Frame:
    """A frame on its way, and its fate."""

    payload: bytes
    is_duplicate: bool
    stray: tuple[int, bytes] | None
    stray_delay_s: float


class FaultyWire:
    """Carries one channel between its two ends."""

    def __init__(self, source: SendSide, target: ReceiveSide, plan: FaultPlan, limits: Limits, channel: bytes) -> None:
        """Join the ends in the running loop; `channel` is part of the seed."""
        self._source = source
        self._target = target
        self._plan = plan
        self._limits = limits
        self._random = Random(f"{plan.seed} {channel.decode()}")  # noqa: S311 - a game, not a secret
        self._loop = asyncio.get_running_loop()
        self._frames = Lane(self._loop)
        self._credits = Lane(self._loop)
        self._arrivals: deque[_Frame] = deque()
        self._landed_duplicates: deque[bool] = deque()
        self._num_credits = 0

    def send(self, payload: bytes) -> None:
        """Put a frame on its way, or what happens in its place."""
        self._source.window.transmit(self._source.window.num_sent)
        delay_s = self._random.uniform(*self._plan.delay_s)
        if self._happens(self._plan.departure_death_rate):
            return self.kill_departure()
        if self._happens(self._plan.landing_death_rate):
            return self._frames.post(delay_s, self.kill_landing)
        if self._happens(self._plan.break_rate):
            return self._frames.post(delay_s, self.lose)
        if self._happens(self._plan.truncate_rate):
            payload = payload[: self._random.randint(1, max(1, len(payload) - 1))]
        is_twice = self._happens(self._plan.duplicate_rate)
        for is_duplicate in (False, True)[: 1 + is_twice]:
            self._frames.post(delay_s, partial(self._on_frame, self._draw_frame(payload, is_duplicate)))
        return None

    def released(self) -> None:
        """The target's owner released its next slot; a duplicate's slot is nobody's credit."""
        self._num_credits += not self._landed_duplicates.popleft()
        delay_s = self._random.uniform(*self._plan.delay_s)
        self._credits.post(delay_s, partial(self._source.credit, self._num_credits))
        self._loop.call_soon(self._land)

    def departure_closed(self) -> None:
        """The landing side learns it behind the frames that are on their way."""
        reason = "memory landing: the peer closed the channel"
        self._frames.post(0, partial(self._target.state.break_off, reason))

    def landing_closed(self) -> None:
        """The departure side learns it behind the credits that are on their way."""
        reason = "memory departure: the peer closed the channel"
        self._credits.post(0, partial(self._source.state.break_off, reason))

    def lose(self) -> None:
        """Both ends lose the connection now."""
        self._source.state.break_off("memory departure: connection lost")
        self._target.state.break_off("memory landing: connection lost")

    def kill_departure(self) -> None:
        """The departure end dies now; the landing end notices as late as it may."""
        self._source.state.break_off("memory departure: this end died")
        self._notice(self._target.state.break_off, "memory landing: nothing came from the peer")

    def kill_landing(self) -> None:
        """The landing end dies now; the departure end notices as late as it may."""
        self._target.state.break_off("memory landing: this end died")
        self._notice(self._source.state.break_off, "memory departure: nothing came from the peer")

    def _notice(self, break_off: Callable[[str], None], reason: str) -> None:
        self._loop.call_later(self._limits.death_s - self._limits.probe_s / 2, break_off, reason)

    def _happens(self, rate: float) -> bool:
        return self._random.random() < rate

    def _draw_frame(self, payload: bytes, is_duplicate: bool) -> _Frame:
        stray_delay_s = self._random.uniform(*self._plan.stray_delay_s)
        stray = None
        if self._happens(self._plan.stray_rate):
            start = self._random.randrange(len(payload))
            num_bytes = min(self._random.randint(1, _MAX_STRAY_BYTES), len(payload) - start)
            # Every byte differs from what was there, or the write could go unnoticed.
            foreign = bytes(byte ^ self._random.randint(1, 255) for byte in payload[start : start + num_bytes])
            stray = (start, foreign)
        return _Frame(payload, is_duplicate, stray, stray_delay_s)

    def _on_frame(self, frame: _Frame) -> None:
        self._arrivals.append(frame)
        self._land()

    def _land(self) -> None:
        while self._arrivals and self._target.state.is_open and self._target.window.has_room():
            frame = self._arrivals.popleft()
            slot = self._target.target()
            slot[: len(frame.payload)] = frame.payload
            self._landed_duplicates.append(frame.is_duplicate)
            if frame.stray is not None and frame.stray_delay_s > 0:
                self._loop.call_later(frame.stray_delay_s, self._write_stray, slot, *frame.stray)
            elif frame.stray is not None:
                self._write_stray(slot, *frame.stray)
            self._target.arrive(len(frame.payload))

    def _write_stray(self, slot: memoryview, start: int, foreign: bytes) -> None:
        if not self._target.state.is_closed:
            slot[start : start + len(foreign)] = foreign


class Lane:
    """One direction: things happen in the order in which they were posted, each after its delay or with the one before it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        """Empty."""
        self._loop = loop
        self._latest_s = 0.0
        self._actions: deque[Callable[[], object]] = deque()

    def post(self, delay_s: float, action: Callable[[], object]) -> None:
        """Do it `delay_s` from now, but not before what was posted earlier."""
        self._actions.append(action)
        self._latest_s = max(self._latest_s, self._loop.time() + delay_s)
        if self._latest_s > self._loop.time():
            self._loop.call_at(self._latest_s, self._do_next)
        else:
            self._loop.call_soon(self._do_next)

    def _do_next(self) -> None:
        self._actions.popleft()()
