"""Decides what is started, restarted and ended, given what happened and the time.

    waiting ──Start──▶ starting ──Listening──▶ listening        the next tier waits until this one has listened once
       ▲                  │ Exited                │ Exited
       └── pause over ── pausing ◀────────────────┘             exit code 2, or too many failed starts: the whole ends

Stopping goes through the tiers backwards (gateway, decode, prefill), each told to drain once the one before has gone.

Never: reads a clock, starts a process, waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum, StrEnum

from kvlease.cli.errors import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_REFUSED
from kvlease.cli.limits import Limits


class Tier(IntEnum):
    """The order of starting. Those of one tier start together."""

    PREFILL = 0
    DECODE = 1
    GATEWAY = 2


# What happened.


@dataclass(frozen=True, slots=True)
class Listening:
    """A server reported its address."""

    name: str
    address: str


@dataclass(frozen=True, slots=True)
class Exited:
    """A server's process is gone. `last_words` is what it said about it, one line or nothing."""

    name: str
    exit_code: int
    last_words: str = ""


@dataclass(frozen=True, slots=True)
class StopAsked:
    """Someone wants the whole to end. Asked a second time, it ends at once."""


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed; also the first event of all."""


Event = Listening | Exited | StopAsked | Tick

# What to do.


@dataclass(frozen=True, slots=True)
class Start:
    """Start this server's process."""

    name: str


@dataclass(frozen=True, slots=True)
class Drain:
    """Ask this server's process to finish (SIGTERM)."""

    name: str


@dataclass(frozen=True, slots=True)
class Kill:
    """End this server's process now (SIGKILL)."""

    name: str


@dataclass(frozen=True, slots=True)
class Say:
    """Tell the operator."""

    line: str


@dataclass(frozen=True, slots=True)
class End:
    """Nothing runs any more."""

    exit_code: int


Action = Start | Drain | Kill | Say | End


class Phase(StrEnum):
    """Of one server."""

    WAITING = "waiting"
    STARTING = "starting"
    LISTENING = "listening"
    PAUSING = "pausing"


@dataclass(slots=True)
class _Server:
    name: str
    tier: Tier
    phase: Phase = Phase.WAITING
    has_listened: bool = False
    has_been_told: bool = False
    started_at: float = 0.0
    resume_at: float = 0.0
    num_deaths: int = 0

    @property
    def is_alive(self) -> bool:
        return self.phase in (Phase.STARTING, Phase.LISTENING)


class Supervisor:
    """The state of one cluster's processes. Feed it events in order; perform what it returns."""

    def __init__(self, servers: Sequence[tuple[str, Tier]], drain_s: float, limits: Limits) -> None:
        self._servers = {name: _Server(name, tier) for name, tier in servers}
        self._drain_s = drain_s
        self._limits = limits
        self._kill_at: float | None = None
        self._has_killed = False
        self._exit_code = 0

    @property
    def is_stopping(self) -> bool:
        """Whether the end was asked for, or forced by a server."""
        return self._kill_at is not None

    def handle(self, event: Event, now: float) -> tuple[Action, ...]:
        """What to do about `event` at `now` (monotonic seconds)."""
        actions: list[Action] = []
        match event:
            case Listening():
                self._note_listening(event)
            case Exited():
                actions += self._note_exit(event, now)
            case StopAsked():
                actions += self._note_stop(now)
            case Tick():
                pass
        actions += self._stop_step(now) if self.is_stopping else self._start_step(now)
        return tuple(actions)

    def next_tick_at(self) -> float | None:
        """When `Tick` is due if nothing happens before; None: not at all."""
        if self._kill_at is not None:
            return None if self._has_killed else self._kill_at
        return min((s.resume_at for s in self._servers.values() if s.phase is Phase.PAUSING), default=None)

    def _note_listening(self, event: Listening) -> None:
        server = self._servers[event.name]
        if server.is_alive:
            server.phase, server.has_listened = Phase.LISTENING, True

    def _note_exit(self, event: Exited, now: float) -> list[Action]:
        server = self._servers[event.name]
        if now - server.started_at >= self._limits.restart_forget_s:
            server.num_deaths = 0
        server.phase = Phase.WAITING
        server.num_deaths += 1
        if self.is_stopping:
            return []
        reason = event.last_words or f"ended with exit code {event.exit_code}"
        if event.exit_code == EXIT_REFUSED:
            return self._begin_stop(now, EXIT_REFUSED, f"{server.name}: {reason}")
        if not server.has_listened and server.num_deaths >= self._limits.max_failed_starts:
            line = f"{server.name} failed to start {server.num_deaths} times, giving up: {reason}"
            return self._begin_stop(now, EXIT_FAILED, line)
        pause_s = self._pause_s(server.num_deaths)
        server.phase, server.resume_at = Phase.PAUSING, now + pause_s
        return [Say(f"{server.name} is gone ({reason}); starting it again in {pause_s:g} s")]

    def _pause_s(self, num_deaths: int) -> float:
        doublings = min(num_deaths - 1, 32)  # beyond any pause, and within a float
        return min(self._limits.restart_first_s * 2.0**doublings, self._limits.restart_most_s)

    def _note_stop(self, now: float) -> list[Action]:
        if not self.is_stopping:
            line = f"finishing what runs, for up to {self._drain_s:g} s; once more to stop at once"
            return self._begin_stop(now, 0, line)
        self._kill_at = now
        self._exit_code = self._exit_code or EXIT_INTERRUPTED
        return []

    def _begin_stop(self, now: float, exit_code: int, line: str) -> list[Action]:
        self._exit_code = exit_code
        self._kill_at = now + self._drain_s
        return [Say(line)]

    def _start_step(self, now: float) -> list[Action]:
        due = [s for s in self._servers.values() if self._is_due(s, now)]
        for server in due:
            server.phase, server.started_at = Phase.STARTING, now
        return [Start(server.name) for server in due]

    def _is_due(self, server: _Server, now: float) -> bool:
        if server.phase is Phase.PAUSING:
            return server.resume_at <= now
        below = (s for s in self._servers.values() if s.tier < server.tier)
        return server.phase is Phase.WAITING and all(s.has_listened for s in below)

    def _stop_step(self, now: float) -> list[Action]:
        assert self._kill_at is not None
        alive = [s for s in self._servers.values() if s.is_alive]
        if not alive:
            return [End(self._exit_code)]
        if self._has_killed:
            return []
        if now >= self._kill_at:
            self._has_killed = True
            self._exit_code = self._exit_code or EXIT_FAILED
            names = ", ".join(s.name for s in alive)
            return [Say(f"ending what has not finished: {names}"), *(Kill(s.name) for s in alive)]
        last = max(s.tier for s in alive)
        told = [s for s in alive if s.tier is last and not s.has_been_told]
        for server in told:
            server.has_been_told = True
        return [Drain(s.name) for s in told]
