"""The `kvlease` command: one exit code and, when something is refused, one line on stderr.

Never: imports a server, torch or gRPC before it is known that one is run.
"""
# ruff: noqa: PLC0415  each command loads only what it runs, so that --help is quick and a gateway has no torch

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from kvlease.cli.options import Invocation

_SUPERVISED = "--supervised"
_BENCH = "bench"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (by default the process's). Returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if len(arguments) == 2 and arguments[1] == _SUPERVISED:  # a child of `serve`: its configuration is on stdin
        from kvlease.cli.child import leave, run_supervised

        leave(run_supervised(arguments[0]))
    return _run_command(arguments)


def _run_command(arguments: Sequence[str]) -> int:
    from kvlease.cli.errors import EXIT_INTERRUPTED, CommandError

    try:
        return _dispatch(arguments)
    except CommandError as error:
        print(f"kvlease: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED


def _dispatch(arguments: Sequence[str]) -> int:
    if arguments and arguments[0] == _BENCH:  # it may run where the servers' libraries are not installed
        from kvlease.cli.bench import run_bench

        return run_bench(arguments[1:])
    from kvlease.cli.options import from_process, render
    from kvlease.cli.settings import DOCTOR, HEALTH, PREPARE, SERVE, STATUS

    invocation = from_process(arguments)
    if invocation.print_config:
        sys.stdout.write(render(invocation))
        return 0
    if invocation.command in (STATUS, HEALTH, PREPARE, DOCTOR):
        return _look(invocation)
    from kvlease.cli.configs import refuse_unusable

    refuse_unusable(invocation.settings)
    if invocation.command != SERVE:
        from kvlease.cli.alone import run_alone
        from kvlease.cli.child import leave

        leave(run_alone(invocation.command, invocation.settings, os.environ))
    from kvlease.cli.serve import serve

    return serve(invocation.settings)


def _look(invocation: Invocation) -> int:
    """A command that serves nothing: it asks, prepares or examines, prints what it found, and ends."""
    from kvlease.cli.limits import Limits
    from kvlease.cli.settings import DOCTOR, HEALTH, STATUS

    if invocation.command == DOCTOR:
        from kvlease.cli.doctor import run_doctor

        return run_doctor(invocation, os.environ)
    if invocation.command == STATUS:
        from kvlease.cli.configs import first_api_key
        from kvlease.cli.status import report_status

        url, api_key = invocation.settings.url, first_api_key(invocation.settings)
        sys.stdout.write(report_status(url, invocation.json, Limits(), api_key))
    elif invocation.command == HEALTH:
        from kvlease.cli.health import report_health

        sys.stdout.write(report_health(invocation.settings, os.environ, Limits()))
    else:
        from kvlease.cli.preparation import prepare

        print(prepare(invocation.settings, ()))
    return 0
