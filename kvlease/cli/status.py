"""`kvlease status`: the gateway's view of every server, as a table.

Never: changes anything; trusts the shape of the answer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kvlease.cli.asking import get
from kvlease.cli.errors import Unreachable
from kvlease.cli.limits import Limits

_HEADINGS = (
    "ROLE",
    "ADDRESS",
    "INCARNATION",
    "QUEUE",
    "RUNNING",
    "FREE",
    "RESERVED",
    "FILLING",
    "READABLE",
    "TOTAL",
    "PAIRS",
    "TRANSPORT",
)
_BLOCK_STATES = ("free", "reserved", "filling", "readable", "total")
_OK = 200
_UNAUTHORIZED = 401


def report_status(url: str, as_json: bool, limits: Limits, api_key: str = "") -> str:
    """What to print. Raises Unreachable."""
    answer = get(url, "/status", limits, api_key)
    if answer.status != _OK:
        hint = ": give --api-keys-file with a key that it knows" if answer.status == _UNAUTHORIZED else ""
        raise Unreachable(f"{url}/status answered {answer.status}{hint}")
    document = answer.json()
    return json.dumps(document, indent=2) + "\n" if as_json else render_table(document)


def render_table(document: Mapping[str, object]) -> str:
    """One line for each server; blocks by state."""
    servers = document.get("servers")
    rows = [_row(server) for server in servers if isinstance(server, dict)] if isinstance(servers, list) else []
    if not rows:
        return "no servers\n"
    return _aligned([_HEADINGS, *rows])


def _row(server: Mapping[str, object]) -> tuple[str, ...]:
    blocks = server.get("blocks")
    counts = blocks if isinstance(blocks, dict) else {}
    pairs = server.get("pairs")
    shown = [_pair(pair) for pair in pairs if isinstance(pair, dict)] if isinstance(pairs, list) else []
    return (
        _text(server, "role"),
        _text(server, "address"),
        _text(server, "incarnation")[:8],
        _text(server, "num_queued"),
        _text(server, "num_running"),
        *(_text(counts, state) for state in _BLOCK_STATES),
        ", ".join(shown) or "-",
        _text(server, "transport"),
    )


def _pair(pair: Mapping[str, object]) -> str:
    """'tcp 127.0.0.1:9001 paired', with the reason when there is one."""
    words = [_text(pair, "transport"), _text(pair, "peer"), _text(pair, "state")]
    detail = pair.get("detail")
    return " ".join(words) + (f" ({detail})" if detail else "")


def _text(source: Mapping[str, object], key: str) -> str:
    value = source.get(key)
    return "-" if value is None or value == "" else "".join(c if c.isprintable() else "?" for c in str(value))


def _aligned(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(_HEADINGS))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"
