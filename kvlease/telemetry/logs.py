"""How an event becomes a line on stderr: `… info decode lease.granted lease=5e0c tenant=default`.

A module writes events with Python's own logging, a name (`noun.verb`) for a message and fields for `extra`:

    logger = logging.getLogger(__name__)
    logger.info("lease.granted", extra={"lease": lease_id, "tenant": tenant})

so nothing but the composition roots needs this package, and other libraries' lines come out of the same handler.

Never: prints what a prompt or an answer said; a field that could carry it fails where the line is written.
"""

from __future__ import annotations

import json
import logging
import re
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Final, TextIO

from kvlease.telemetry.errors import UnknownLogLevel
from kvlease.telemetry.limits import LIMITS

LEVELS: Final = ("debug", "info", "warning", "error")
REFUSED_FIELDS: Final = frozenset({"completion", "content", "messages", "prompt", "text", "token_ids"})

#: Their level is the configured one; other libraries are heard from `warning` up.
OUR_LOGGERS: Final = ("decode_server", "gateway", "kvlease", "prefill_server", "transport")

_BARE_VALUE: Final = re.compile(r"[A-Za-z0-9_./:@%+,\[\]-]+")
_EVENT_NAME: Final = re.compile(r"[a-z0-9_]+(?:\.[a-z0-9_]+)+")
_NOT_FIELDS: Final = frozenset({*logging.makeLogRecord({}).__dict__, "asctime", "color_message", "message", "taskName"})


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened. `level` is a number of the `logging` module."""

    name: str
    level: int
    fields: Mapping[str, object]

    @classmethod
    def of(cls, record: logging.LogRecord) -> Event:
        """The event in a record. A sentence of another library becomes the event `log.line`."""
        fields = {key: value for key, value in record.__dict__.items() if key not in _NOT_FIELDS}
        message = record.getMessage()
        if _EVENT_NAME.fullmatch(message):
            return cls(message, record.levelno, fields)
        return cls("log.line", record.levelno, {"logger": record.name, "line": message, **fields})


def set_up_logs(role: str, *, level: str = "info", as_json: bool = False, stream: TextIO | None = None) -> None:
    """Send everything that is logged in this process to `stream` (stderr), one line each, named after `role` (`decode`).

    Calling it again replaces what the call before set up. Raises `UnknownLogLevel`.
    """
    if level not in LEVELS:
        raise UnknownLogLevel(f"unknown log level {level!r}; use one of {', '.join(LEVELS)}")
    handler = _LineHandler(stream or sys.stderr)
    handler.setFormatter(_JsonFormatter(role) if as_json else _LineFormatter(role))
    handler.addFilter(_refuse_what_clients_said)
    root = logging.getLogger()
    for earlier in [known for known in root.handlers if isinstance(known, _LineHandler)]:
        root.removeHandler(earlier)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(level.upper())


@dataclass(slots=True)
class CapturedEvents:
    """The events written while a test ran, oldest first."""

    events: list[Event] = field(default_factory=list)

    def named(self, name: str) -> list[Event]:
        """Those of one name."""
        return [event for event in self.events if event.name == name]

    def names(self) -> list[str]:
        """All names, in order."""
        return [event.name for event in self.events]


@contextmanager
def capture_events() -> Iterator[CapturedEvents]:
    """For tests: collects every event of our packages in this process, whatever its level."""
    captured = CapturedEvents()
    handler = _CapturingHandler(captured)
    handler.addFilter(_refuse_what_clients_said)
    loggers = [logging.getLogger(name) for name in OUR_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(handler)
        logger.setLevel(logging.DEBUG)
    try:
        yield captured
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.removeHandler(handler)
            logger.setLevel(level)


def _refuse_what_clients_said(record: logging.LogRecord) -> bool:
    found = REFUSED_FIELDS & record.__dict__.keys()
    assert not found, f"{record.getMessage()}: no log line may carry {sorted(found)}"
    return True


class _LineHandler(logging.StreamHandler[TextIO]):
    """Ours, so that `set_up_logs` knows which handler to replace."""


class _CapturingHandler(logging.Handler):
    def __init__(self, captured: CapturedEvents) -> None:
        super().__init__()
        self._captured = captured

    def emit(self, record: logging.LogRecord) -> None:
        self._captured.events.append(Event.of(record))


class _LineFormatter(logging.Formatter):
    """`2025-03-01T12:00:00.250Z info decode lease.granted lease=5e0c tenant=default`."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        event = Event.of(record)
        words = [_timestamp(record), record.levelname.lower(), self._role, event.name]
        words += [f"{key}={_as_word(value)}" for key, value in event.fields.items()]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonFormatter(logging.Formatter):
    """The same as one JSON object a line."""

    def __init__(self, role: str) -> None:
        super().__init__()
        self._role = role

    def format(self, record: logging.LogRecord) -> str:
        event = Event.of(record)
        fields = {key: _as_json(value) for key, value in event.fields.items()}
        line = {"time": _timestamp(record), "level": record.levelname.lower(), "role": self._role, "event": event.name}
        traceback = {"traceback": self.formatException(record.exc_info)} if record.exc_info else {}
        return json.dumps({**line, "fields": fields, **traceback})


def _timestamp(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _as_word(value: object) -> str:
    """A value as one word: quoted where it holds anything that could be taken for another field or another line."""
    if isinstance(value, float):
        return f"{value:.6g}"
    text = _as_text(value)
    return text if _BARE_VALUE.fullmatch(text) else json.dumps(text)


def _as_json(value: object) -> str | int | float | None:
    return value if value is None or isinstance(value, int | float) else _as_text(value)


def _as_text(value: object) -> str:
    text = value.hex() if isinstance(value, bytes) else str(value)
    return text if len(text) <= LIMITS.max_value_chars else f"{text[: LIMITS.max_value_chars]}…"
