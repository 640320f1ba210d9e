"""Which cells of the two state tables a step went through, told from outside: what happened, and the states before and after."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from kvlease.handoff import decode_attempt as d
from kvlease.handoff import prefill_attempt as p
from kvlease.handoff.messages import Aborted, Admitted, Commit, Complete, Grant, Ready, Receipt, Rejected
from kvlease.handoff.tables import DECODE_TABLE, PREFILL_TABLE, DecodeEvent, PrefillEvent
from tests.explorer.ghost import Broken

Cell = tuple[str, str, str]  # role, state, event

_DECODE_EVENTS: Mapping[type, DecodeEvent] = {
    Admitted: DecodeEvent.ADMITTED,
    Rejected: DecodeEvent.REJECTED,
    Ready: DecodeEvent.READY,
    d.RoomReserved: DecodeEvent.ROOM,
    d.BlockVerified: DecodeEvent.BLOCK,
    d.BlockRefused: DecodeEvent.END,
    Commit: DecodeEvent.COMMIT,
    Complete: DecodeEvent.COMPLETE,
    Aborted: DecodeEvent.END,
    d.Ended: DecodeEvent.END,
}
_PREFILL_EVENTS: Mapping[type, PrefillEvent] = {
    p.Started: PrefillEvent.START,
    p.ChunkComputed: PrefillEvent.CHUNK,
    p.BlockSent: PrefillEvent.BLOCK,
    Grant: PrefillEvent.GRANT,
    Receipt: PrefillEvent.RECEIPT,
    p.EndedHere: PrefillEvent.END,
}


def all_cells() -> set[Cell]:
    """Every legal move of both tables."""
    decode = {("decode", str(state), str(event)) for state, moves in DECODE_TABLE.items() for event in moves}
    return decode | {("prefill", str(state), str(event)) for state, moves in PREFILL_TABLE.items() for event in moves}


@dataclass(slots=True)
class Trails:
    """Filled while the world moves."""

    cells: set[Cell] = field(default_factory=set)

    def decode(self, before: d.DecodeAttempt, happening: object, after: d.DecodeAttempt) -> None:
        if not before.is_over:
            self._walk("decode", DECODE_TABLE, before.state, _DECODE_EVENTS[type(happening)], after.state)

    def prefill(self, before: p.PrefillAttempt, happening: object, after: p.PrefillAttempt) -> None:
        if before.is_over:
            return
        if isinstance(happening, p.Judged):
            event = PrefillEvent.REJECT if isinstance(happening.verdict, Rejected) else PrefillEvent.ADMIT
        else:
            event = _PREFILL_EVENTS[type(happening)]
        self._walk("prefill", PREFILL_TABLE, before.state, event, after.state)

    def _walk(self, role: str, table: Mapping[Any, Mapping[Any, StrEnum]], before: Any, event: Any, after: Any) -> None:
        """One event, and at most one more that follows from it."""
        if event not in table[before]:
            raise Broken("P2", f"{role} took {event} while {before}: two honest servers made an illegal move")
        middle = table[before][event]
        follows = [second for second, target in table[middle].items() if target == after]
        if middle == after or len(follows) == 1:
            self.cells.add((role, str(before), str(event)))
        if middle != after and len(follows) == 1:
            self.cells.add((role, str(middle), str(follows[0])))
