from __future__ import annotations

import asyncio
import errno

import pytest

from kvlease.cli.child import run_to_exit


class Refusing(Exception):
    exit_code = 2


async def failing(error: BaseException) -> None:
    await asyncio.sleep(0)
    raise error


@pytest.mark.parametrize(
    ("error", "exit_code", "line"),
    [
        (SystemExit("port 1:\n taken"), 2, "port 1: taken"),
        (Refusing("no\nmodel"), 2, "no model"),
        (ExceptionGroup("tasks", [ValueError("a"), ExceptionGroup("inner", [Refusing("no model")])]), 2, "no model"),
        (OSError(errno.EADDRINUSE, "Address already in use"), 2, "[Errno 98] Address already in use"),
    ],
)
def test_a_refusal_is_one_line_and_its_exit_code(error: BaseException, exit_code: int, line: str) -> None:
    lines: list[str] = []
    assert run_to_exit(failing(error), lines.append) == exit_code
    assert lines == [line]


@pytest.mark.parametrize("error", [ValueError("a fault"), OSError(errno.EIO, "I/O"), ExceptionGroup("g", [KeyError()])])
def test_a_fault_is_no_refusal_and_leaves_its_traceback(error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    lines: list[str] = []
    assert run_to_exit(failing(error), lines.append) == 1
    assert lines == []
    assert "Traceback" in caplog.text


@pytest.mark.parametrize(("code", "exit_code"), [(None, 0), (0, 0), (7, 7)])
def test_an_exit_code_is_passed_through(code: int | None, exit_code: int) -> None:
    assert run_to_exit(failing(SystemExit(code)), pytest.fail) == exit_code


def test_the_end_of_a_server_is_a_clean_exit() -> None:
    assert run_to_exit(asyncio.sleep(0), pytest.fail) == 0
