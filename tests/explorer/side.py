"""A server as a function: from its state and what happens to it, to its next state and what it does to the rest of the world.

Each call is made on the shipped objects, once for each pair of state and happening; the same pair again gives the same answer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from kvlease.kvcache.memory import Room
from kvlease.kvcache.pool import BlockPool
from tests.explorer.ghost import GhostLedger, GhostStorage, request_of, require, truth

Effect = tuple[Any, ...]


class Numbered(Protocol):
    """A state of one side; equal states have equal numbers."""

    number: int

    def key(self) -> tuple[object, ...]: ...


class Server(Protocol):
    """The shipped objects of one side."""

    effects: list[Effect]
    ledger: GhostLedger
    storage: GhostStorage

    @property
    def pool(self) -> BlockPool: ...

    def load(self, state: Any) -> None: ...

    def save(self) -> Any: ...

    def rooms(self) -> list[tuple[int, Room]]: ...

    def rooms_at_work(self) -> list[tuple[int, Room]]: ...


class Side:
    """Remembers what it was asked."""

    def __init__(self, server: Server, where: str) -> None:
        self.server, self.where = server, where
        self._states: dict[tuple[object, ...], Any] = {}
        self._answers: dict[tuple[Any, ...], tuple[Any, tuple[Effect, ...]]] = {}

    def number(self, state: Any) -> Any:
        """The one object for this state, with its number."""
        known = self._states.setdefault(state.key(), state)
        if known is state:
            object.__setattr__(state, "number", len(self._states))
        return known

    def ask(self, state: Any, happening: Callable[..., None], *arguments: Any) -> tuple[Any, tuple[Effect, ...]]:
        """`happening` is a method of the server."""
        question = (state.number, happening.__name__, arguments)
        answer = self._answers.get(question)
        if answer is None:
            self.server.load(state)
            self.server.effects.clear()
            happening(*arguments)
            judge_memory(self.server, self.where)
            answer = self._answers[question] = (self.number(self.server.save()), tuple(self.server.effects))
        return answer


def judge_memory(server: Server, where: str) -> None:
    """P1, P5, P8: who has which block, and whose bytes are in it."""
    server.pool.check()
    held: dict[int, int] = {}
    for request, room in server.rooms():
        for block in room.table:
            require(held.setdefault(block, request) == request, "P8", f"two requests hold block {block} at {where}")
    for request, room in server.rooms_at_work():
        for block in room.table:
            other = held.setdefault(block, request)
            require(other == request, "P1", f"a thread of {where} works on block {block} that request {other} has now")
    counts = server.pool.counts()
    require(counts.free >= counts.total - len(held), "P5", f"{where} has {counts}, but only {sorted(held)} are in use")
    for slot, sequence, position in server.ledger.claims():
        found, request = server.storage.slot(slot), request_of(sequence)
        right = found == truth(request, position)
        require(right, "P1", f"{where} calls {found} readable as position {position} of request {request}")
