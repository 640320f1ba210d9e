"""`docs/protocol.md`, printed from the tables and verdicts: the document cannot say what the code does not do.

    python -m kvlease.handoff.document > docs/protocol.md

Never: holds a fact of its own about the protocol's states.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum
from typing import Any

from kvlease.handoff.limits import PROTOCOL_VERSION, Limits
from kvlease.handoff.tables import DECODE_TABLE, PREFILL_TABLE
from kvlease.handoff.verdicts import ABORTS, REJECTIONS, Treatment

_INTRODUCTION = """# The protocol between the servers

Printed by `python -m kvlease.handoff.document`; do not edit. Protocol version {version}.

A decode server opens one bidirectional stream for each attempt at a request. The stream *is* the attempt: its messages are in order,
and its end, for any reason, ends the attempt on both sides. An event without a place in a table is an illegal move: the
attempt ends as `protocol_error`. Nothing follows a state without events.

A pair stands still for at most {stall} s: each side shows every {beat} s that it lives and that its engine moves.
"""


def document() -> str:
    """The whole page."""
    limits = Limits()
    parts = [
        _INTRODUCTION.format(version=PROTOCOL_VERSION, stall=f"{limits.stall_s:g}", beat=f"{limits.heartbeat_s:g}"),
        _table("Decode", DECODE_TABLE),
        _table("Prefill", PREFILL_TABLE),
        _reasons("Rejected: before anything is granted", REJECTIONS),
        _reasons("Aborted: after admission", ABORTS),
    ]
    return "\n".join(parts)


def _table(role: str, table: Mapping[Any, Mapping[Any, StrEnum]]) -> str:
    rows = [f"## {role}", "", "| state | event | next state |", "|---|---|---|"]
    for state, moves in table.items():
        rows += [f"| {state} | {event} | {target} |" for event, target in moves.items()] or [f"| {state} | | |"]
    return "\n".join(rows) + "\n"


def _reasons(title: str, reasons: Mapping[Any, Treatment]) -> str:
    head = [f"## {title}", "", "| reason | code | HTTP status | another attempt may help |", "|---|---|---|---|"]
    return "\n".join([*head, *_rows(reasons.items())]) + "\n"


def _rows(reasons: Iterable[tuple[object, Treatment]]) -> Iterable[str]:
    for reason, treatment in reasons:
        again = "yes" if treatment.retryable else "no"
        yield f"| {reason} | {treatment.code} | {treatment.http_status} | {again} |"


if __name__ == "__main__":
    print(document(), end="")  # noqa: T201 - a command's output is its purpose
