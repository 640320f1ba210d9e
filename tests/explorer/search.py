"""Breadth first over all states of a scenario; the shortest way to what breaks a promise.

Liveness is not sampled: with its faults spent, every move takes a run nearer to its end (no state comes twice, which is checked), so if
each state in which nothing can happen has every request ended once and both pools full, each run from each state ends so.
"""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

from tests.explorer.events import Event, faults, last_resort, own_moves, perform
from tests.explorer.ghost import Broken
from tests.explorer.judge import judge_rest
from tests.explorer.requests import Scenario
from tests.explorer.trails import Cell
from tests.explorer.world import State, World


@dataclass(slots=True)
class Violation:
    """A broken promise, the way to it, and what was said on the way."""

    promise: str
    text: str
    events: tuple[Event, ...]


@dataclass(slots=True)
class Exploration:
    """What was seen. `is_whole`: every state of the scenario was visited."""

    scenario: Scenario
    num_states: int = 0
    num_moves: int = 0
    num_rests: int = 0
    depth: int = 0
    seconds: float = 0.0
    is_whole: bool = False
    violation: Violation | None = None
    cells: set[Cell] = field(default_factory=set)


class Search:
    """One exploration. States are kept as they are only until they were visited; a visited one is known by its parts' numbers."""

    def __init__(self, scenario: Scenario, *, looks_at_rests: bool = True) -> None:
        self.world = World(scenario)
        self.found = Exploration(scenario, cells=self.world.trails.cells)
        self._looks_at_rests = looks_at_rests
        self._parts: dict[object, int] = {}
        self._seen: dict[tuple[int, ...], int] = {}
        self._parents = array("l")
        self._arrivals: list[Event] = []
        self._own_edges = (array("l"), array("l"))  # from, to: moves that cost no fault

    def run(self) -> Exploration:
        started = time.perf_counter()
        try:
            self._explore()
        except Broken as broken:
            self.found.violation = Violation(broken.promise, str(broken), ())
        self.found.seconds = time.perf_counter() - started
        return self.found

    def _explore(self) -> None:
        first = self.world.first()
        self._enter(first, -1, ("start",))
        level = [(0, first)]
        while level:
            following: list[tuple[int, State]] = []
            for number, state in level:
                if not self._visit(number, state, following):
                    return
            self.found.depth += bool(following)
            level = following
        self.found.is_whole = True
        self._check_that_runs_end()

    def _visit(self, number: int, state: State, following: list[tuple[int, State]]) -> bool:
        """Whether to go on."""
        can_move = False
        for event in own_moves(state):
            if not self._move(number, state, event, following, is_fault=False):
                return False
            can_move |= self._last_target != number
        if not can_move:
            for event in last_resort(state):
                if not self._move(number, state, event, following, is_fault=False):
                    return False
                can_move |= self._last_target != number
        if not can_move and self._looks_at_rests and not self._rest(number, state):
            return False
        return all(
            self._move(number, state, event, following, is_fault=True)
            for event in faults(state, self.found.scenario.faults)
        )

    def _move(
        self, number: int, state: State, event: Event, following: list[tuple[int, State]], *, is_fault: bool
    ) -> bool:
        world = self.world
        try:
            world.load(state)
            perform(world, event, is_fault=is_fault)
            after = world.save()
        except Exception as error:  # noqa: BLE001 - whatever the shipped code raises would end a server
            self._break(number, event, error)
            return False
        self.found.num_moves += 1
        target, is_new = self._enter(after, number, event)
        self._last_target = target
        if is_new:
            following.append((target, after))
        if not is_fault and target != number:
            self._own_edges[0].append(number)
            self._own_edges[1].append(target)
        return True

    def _rest(self, number: int, state: State) -> bool:
        decode, prefill = self.world.decode_server, self.world.prefill_server
        decode.load(state.decode)
        prefill.load(state.prefill)
        self.found.num_rests += 1
        try:
            judge_rest(decode, prefill)
        except Broken as broken:
            self._break(number, None, broken)
            return False
        return True

    def _break(self, number: int, event: Event | None, error: Exception) -> None:
        events = [] if event is None else [event]
        while number > 0:
            events.append(self._arrivals[number])
            number = self._parents[number]
        promise = error.promise if isinstance(error, Broken) else "P10"
        text = str(error) if isinstance(error, Broken) else f"a server fails: {type(error).__name__}: {error}"
        self.found.violation = Violation(promise, text, tuple(reversed(events)))

    def _enter(self, state: State, parent: int, event: Event) -> tuple[int, bool]:
        parts = self._parts
        key = (
            state.decode.number,
            state.prefill.number,
            parts.setdefault(state.channel, len(parts)),
            parts.setdefault(state.streams, len(parts)),
            parts.setdefault((state.old_epochs, state.verdicts, state.hurt, state.crashes), len(parts)),
            state.faults_left,
        )
        number = self._seen.get(key)
        if number is not None:
            return number, False
        number = self._seen[key] = len(self._seen)
        self._parents.append(parent)
        self._arrivals.append(event)
        self.found.num_states += 1
        return number, True

    def _check_that_runs_end(self) -> None:
        """No run without faults goes round in a circle: the moves have a topological order."""
        num_into = array("l", bytes(8 * len(self._seen)))
        onward: list[list[int]] = [[] for _ in self._seen]
        for source, target in zip(*self._own_edges, strict=True):
            num_into[target] += 1
            onward[source].append(target)
        ready = [number for number, count in enumerate(num_into) if not count]
        num_ordered = 0
        while ready:
            num_ordered += 1
            for target in onward[ready.pop()]:
                num_into[target] -= 1
                if not num_into[target]:
                    ready.append(target)
        if num_ordered < len(self._seen):
            raise Broken(
                "P6", f"{len(self._seen) - num_ordered} states lie on or behind a circle of moves without a fault"
            )
