"""What a log line holds, and what it never does."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from kvlease.telemetry.errors import UnknownLogLevel
from kvlease.telemetry.limits import LIMITS
from kvlease.telemetry.logs import OUR_LOGGERS, REFUSED_FIELDS, capture_events, set_up_logs

logger = logging.getLogger("kvlease.example")


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    ours = [logging.getLogger(name) for name in OUR_LOGGERS]
    root = logging.getLogger()
    handlers, levels = root.handlers[:], [known.level for known in [root, *ours]]
    yield
    root.handlers[:] = handlers
    for known, level in zip([root, *ours], levels, strict=True):
        known.setLevel(level)


def written(*, as_json: bool = False, level: str = "info") -> io.StringIO:
    stream = io.StringIO()
    set_up_logs("decode", level=level, as_json=as_json, stream=stream)
    return stream


def test_an_event_is_one_line_of_level_role_name_and_fields() -> None:
    stream = written()
    logger.info("lease.granted", extra={"lease": b"\x5e\x0c", "tenant": "default", "num_blocks": 7, "seconds": 0.25})
    _, _, line = stream.getvalue().partition(" ")
    assert line == "info decode lease.granted lease=5e0c tenant=default num_blocks=7 seconds=0.25\n"


def test_a_value_cannot_pretend_to_be_another_field_or_line() -> None:
    stream = written()
    logger.warning("peer.refused", extra={"reason": "bad\nerror decode pool.lost tenant=other"})
    assert stream.getvalue().count("\n") == 1
    assert r'reason="bad\nerror decode pool.lost tenant=other"' in stream.getvalue()


@pytest.mark.parametrize("as_json", [False, True])
def test_a_long_value_is_cut(as_json: bool) -> None:
    stream = written(as_json=as_json)
    logger.info("peer.refused", extra={"reason": "x" * (LIMITS.max_value_chars + 1000)})
    assert len(stream.getvalue()) < LIMITS.max_value_chars + 200


@pytest.mark.parametrize("name", sorted(REFUSED_FIELDS))
def test_a_field_that_could_hold_what_a_client_said_is_refused(name: str) -> None:
    stream = written()
    with pytest.raises(AssertionError, match=name):
        logger.info("request.finished", extra={name: "hello"})
    assert "hello" not in stream.getvalue()


def test_such_a_field_is_refused_in_a_test_that_captures_too() -> None:
    with capture_events(), pytest.raises(AssertionError, match="prompt"):
        logger.debug("request.finished", extra={"prompt": "hello"})


def test_json_holds_the_same_as_the_line() -> None:
    stream = written(as_json=True)
    logger.info("lease.granted", extra={"lease": b"\x5e\x0c", "num_blocks": 7})
    line = json.loads(stream.getvalue())
    assert (line["event"], line["role"], line["fields"]) == (
        "lease.granted",
        "decode",
        {"lease": "5e0c", "num_blocks": 7},
    )


def test_setting_up_twice_writes_each_line_once() -> None:
    first = written()
    second = written()
    logger.info("server.ready")
    assert (first.getvalue(), second.getvalue().count("server.ready")) == ("", 1)


def test_the_level_decides_what_is_written() -> None:
    stream = written(level="warning")
    logger.info("server.ready")
    logger.error("server.failed")
    assert "server.ready" not in stream.getvalue()
    assert "server.failed" in stream.getvalue()


def test_an_unknown_level_stops_the_start_and_names_those_that_exist() -> None:
    with pytest.raises(UnknownLogLevel, match="debug, info, warning, error"):
        set_up_logs("decode", level="loud")


@pytest.mark.parametrize("as_json", [False, True])
def test_an_error_is_written_with_its_traceback(as_json: bool) -> None:
    stream = written(as_json=as_json)
    try:
        raise ValueError("seven")
    except ValueError:
        logger.exception("engine.failed")
    assert "ValueError: seven" in stream.getvalue()


def test_other_libraries_come_out_of_the_same_handler_from_warning_up() -> None:
    stream = written(level="debug")
    logging.getLogger("other").warning("odd %s", "thing")
    logging.getLogger("other").info("chatter")
    assert 'log.line logger=other line="odd thing"' in stream.getvalue()
    assert "chatter" not in stream.getvalue()


def test_captured_events_are_those_written_inside_in_order() -> None:
    logger.info("server.starting")
    with capture_events() as captured:
        logger.debug("lease.granted", extra={"lease": "a"})
        logger.info("lease.ended", extra={"lease": "a"})
    logger.info("server.ending")
    assert captured.names() == ["lease.granted", "lease.ended"]
    assert captured.named("lease.ended")[0].fields == {"lease": "a"}
