"""One server's process: alone at a terminal, or supervised by a parent.

A supervised server reads one line of JSON from stdin (`parent_pid`, `report_fd`, `log_level`, `config`), reports on the descriptor it was given
(`{"listening": "127.0.0.1:4711"}`, `{"refused": "why"}`), and cannot outlive its parent: the kernel kills it when the parent dies, and
the end of stdin does where the kernel does not.

Never: decides what to run; lets a traceback stand for a refused configuration.
"""
# ruff: noqa: PLC0415  a process loads the server it runs and no other

from __future__ import annotations

import asyncio
import ctypes
import errno
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass
from typing import NoReturn

from decode_server.config import DecodeConfig
from gateway.config import GatewayConfig
from kvlease.cli.configs import ServerConfig, from_document
from kvlease.cli.errors import EXIT_FAILED, EXIT_REFUSED
from kvlease.cli.limits import Limits
from kvlease.cli.settings import DECODE, GATEWAY, PREFILL
from kvlease.telemetry.logs import set_up_logs
from prefill_server.config import PrefillConfig

_PR_SET_PDEATHSIG = 1
_STDIN = 0
MAX_REPORT_CHARS = 512  # at most six bytes each in JSON: below PIPE_BUF, so a report is never torn
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Supervision:
    """A supervised process's side of its ties to the parent."""

    log_level: str
    config: Mapping[str, object]
    report_fd: int

    def report_listening(self, address: str) -> None:
        """Tell the parent where this server listens."""
        self._report("listening", address)

    def report_refused(self, line: str) -> None:
        """Tell the parent why this server will not run."""
        self._report("refused", line)

    def _report(self, kind: str, text: str) -> None:
        """One line, small enough to be written in one piece. A parent that is gone needs no report."""
        with suppress(BrokenPipeError):
            os.write(self.report_fd, json.dumps({kind: text[:MAX_REPORT_CHARS]}).encode() + b"\n")


def attach() -> Supervision:
    """Tie this process's life to its parent's, and read what the parent wants. Exits when the parent is gone already."""
    die_with_parent()
    document = json.loads(_read_line(Limits().max_document_bytes))
    if os.getppid() != document["parent_pid"]:  # it died before the kernel was asked to watch it
        raise SystemExit(EXIT_FAILED)
    threading.Thread(target=_end_with_stdin, name="lifeline", daemon=True).start()
    report_fd: int = document["report_fd"]
    os.set_inheritable(report_fd, False)
    return Supervision(document["log_level"], document["config"], report_fd)


def run_supervised(command: str) -> int:
    """Run the server `command` with the configuration that the parent writes to stdin. Returns the exit code."""
    parent = attach()
    set_up_logs(command, level=parent.log_level)
    config = from_document(config_type(command), parent.config)
    return run_to_exit(serving(config, parent.report_listening), parent.report_refused)


def run_to_exit(server: Coroutine[None, None, None], refuse: Callable[[str], None]) -> int:
    """Run `server` until it ends. A refused configuration goes to `refuse` as one line. Returns the exit code."""
    try:
        asyncio.run(server)
    except SystemExit as error:
        if not isinstance(error.code, str):
            return error.code or 0
        refuse(one_line(error.code))
        return EXIT_REFUSED
    except KeyboardInterrupt:
        return 0
    except Exception as error:
        refusal = find_refusal(error)
        if refusal is None:
            logger.exception("server.failed")
            return EXIT_FAILED
        refuse(one_line(str(refusal[0])))
        return refusal[1]
    return 0


def leave(exit_code: int) -> NoReturn:
    """End the process now. Taking apart an interpreter that has loaded torch costs seconds, and everything of ours is closed."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(exit_code)


async def serving(config: ServerConfig, ready: Callable[[str], None]) -> None:
    """The server that `config` describes. Imports only this one: the gateway's process never loads torch."""
    if isinstance(config, GatewayConfig):
        from gateway import app as gateway_app

        await gateway_app.run(config, ready)
    elif isinstance(config, DecodeConfig):
        from decode_server import app as decode_app

        await decode_app.run(config, ready)
    else:
        from prefill_server import app as prefill_app

        await prefill_app.run(config, ready)


def config_type(command: str) -> type[ServerConfig]:
    """The configuration's type of a server's command."""
    types: dict[str, type[ServerConfig]] = {GATEWAY: GatewayConfig, PREFILL: PrefillConfig, DECODE: DecodeConfig}
    return types[command]


def find_refusal(error: Exception) -> tuple[Exception, int] | None:
    """The error within `error` that says what the process should end with, and that; None: it is a fault, not a refusal.

    An error says so with an attribute `exit_code`; an address in use needs none.
    """
    if isinstance(error, ExceptionGroup):
        return next((found for inner in error.exceptions if (found := find_refusal(inner))), None)
    if isinstance(error, OSError) and error.errno in (errno.EADDRINUSE, errno.EADDRNOTAVAIL):
        return error, EXIT_REFUSED
    exit_code = getattr(error, "exit_code", None)
    return (error, exit_code) if isinstance(exit_code, int) else None


def one_line(message: str) -> str:
    """The message without line breaks."""
    return " ".join(message.split())


def limit_threads(num_threads: int, environ: MutableMapping[str, str]) -> None:
    """Tell every numeric library, before it is loaded."""
    for variable in _THREAD_VARIABLES:
        environ[variable] = str(num_threads)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the thread that started it ends. See prctl(2), PR_SET_PDEATHSIG."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def _read_line(max_bytes: int) -> bytes:
    """The first line of stdin, unbuffered, so that the lifeline sees the end of the pipe."""
    line = bytearray()
    while not line.endswith(b"\n"):
        part = os.read(_STDIN, 64 << 10)
        if not part:
            raise SystemExit(EXIT_FAILED)  # the parent died while it wrote
        line += part
        if len(line) > max_bytes:
            raise SystemExit(f"the configuration on stdin is longer than {max_bytes} bytes")
    return bytes(line)


def _end_with_stdin() -> None:
    """Block until the parent's end of stdin is closed, then end without a word: nobody is left to hear it."""
    while os.read(_STDIN, 4096):
        pass
    os.kill(os.getpid(), signal.SIGKILL)
