"""The processes of one cluster: starts them, reads their reports and logs, and performs what the supervisor decides.

    parent ──stdin: one JSON line, then held open──▶ child      its end kills the child
    parent ◀──report descriptor: JSON lines───────── child
    parent ◀──stdout and stderr: log lines────────── child      passed on to stderr, prefixed by the child's name

Never: decides whether something is restarted; puts a configuration on a command line or into an environment.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from kvlease.cli.errors import EXIT_FAILED
from kvlease.cli.limits import Limits
from kvlease.cli.supervision import (
    Action,
    Drain,
    End,
    Event,
    Exited,
    Kill,
    Listening,
    Say,
    Start,
    StopAsked,
    Supervisor,
    Tick,
    Tier,
)


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """How to start one server: the program and its arguments, its environment, and the document for its stdin.

    The document gains `parent_pid` and `report_fd` at each start.
    """

    name: str
    tier: Tier
    program: tuple[str, ...]
    environ: Mapping[str, str]
    document: Mapping[str, object]


class Cluster:
    """Runs servers until they are stopped. Use once."""

    def __init__(
        self,
        servers: Sequence[ServerProcess],
        drain_s: float,
        write_log: Callable[[bytes], None],
        limits: Limits,
    ) -> None:
        self._servers = {server.name: server for server in servers}
        self._supervisor = Supervisor([(server.name, server.tier) for server in servers], drain_s, limits)
        self._write_log = write_log
        self._limits = limits
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._processes: dict[str, asyncio.subprocess.Process] = {}
        self._last_words: dict[str, str] = {}

    async def run(self, when_up: Coroutine[None, None, None]) -> int:
        """Start everything, and end when everything has ended. `when_up` runs beside it. Returns the exit code.

        Must run in the main thread: the kernel ties the children's lives to the thread that starts them.
        """
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:  # nohup means it
                loop.add_signal_handler(number, self._events.put_nowait, StopAsked())
        async with asyncio.TaskGroup() as tasks:
            beside = tasks.create_task(when_up)
            exit_code = await self._supervise(tasks)
            beside.cancel()
        return exit_code

    async def _supervise(self, tasks: asyncio.TaskGroup) -> int:
        event: Event = Tick()
        while True:
            for action in self._supervisor.handle(event, time.monotonic()):
                if isinstance(action, End):
                    return action.exit_code
                await self._perform(action, tasks)
            event = await self._next_event()

    async def _next_event(self) -> Event:
        tick_at = self._supervisor.next_tick_at()
        left_s = None if tick_at is None else max(0.0, tick_at - time.monotonic())
        try:
            return await asyncio.wait_for(self._events.get(), left_s)
        except TimeoutError:
            return Tick()

    async def _perform(self, action: Action, tasks: asyncio.TaskGroup) -> None:
        match action:
            case Start(name):
                await self._start(self._servers[name], tasks)
            case Drain(name):
                self._signal(name, signal.SIGTERM)
            case Kill(name):
                self._signal(name, signal.SIGKILL)
            case Say(line):
                self._write_log(f"kvlease: {line}\n".encode())
            case End():
                raise AssertionError("the loop ends before it performs an End")

    def _signal(self, name: str, number: signal.Signals) -> None:
        if name in self._processes:
            with suppress(ProcessLookupError):
                self._processes[name].send_signal(number)

    async def _start(self, server: ServerProcess, tasks: asyncio.TaskGroup) -> None:
        report_in, report_out = os.pipe()
        try:
            process = await asyncio.create_subprocess_exec(
                *server.program,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                env=dict(server.environ),
                pass_fds=(report_out,),
                process_group=0,  # Ctrl-C at a terminal reaches the parent only, which then stops the children in order
            )
        except OSError as error:
            os.close(report_in)
            self._events.put_nowait(Exited(server.name, EXIT_FAILED, f"cannot be started: {error.strerror}"))
            return
        finally:
            os.close(report_out)
        self._processes[server.name] = process
        self._last_words.pop(server.name, None)
        document = {**server.document, "parent_pid": os.getpid(), "report_fd": report_out}
        assert process.stdin is not None
        process.stdin.write(json.dumps(document).encode() + b"\n")
        tasks.create_task(self._watch(server.name, process, report_in))

    async def _watch(self, name: str, process: asyncio.subprocess.Process, report_in: int) -> None:
        """From a process's start to its end, whose event comes after everything it reported."""
        assert process.stdout is not None
        logs = asyncio.create_task(self._pass_logs_on(name, process.stdout))
        reports = asyncio.create_task(self._read_reports(name, report_in))
        try:
            exit_code = await process.wait()
            await asyncio.wait((logs, reports), timeout=self._limits.last_words_s)
        finally:
            logs.cancel()
            reports.cancel()
        self._processes.pop(name, None)
        self._events.put_nowait(Exited(name, exit_code, self._last_words.get(name, "")))

    async def _read_reports(self, name: str, report_in: int) -> None:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(report_in, "rb", buffering=0)
        transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        try:
            while line := await reader.readline():
                self._note_report(name, line)
        finally:
            transport.close()

    def _note_report(self, name: str, line: bytes) -> None:
        try:
            report = json.loads(line)
        except ValueError:
            self._write_log(f"[{name}] a report that is not JSON was dropped\n".encode())
            return
        if "listening" in report:
            self._events.put_nowait(Listening(name, report["listening"]))
        elif "refused" in report:
            self._last_words[name] = report["refused"]

    async def _pass_logs_on(self, name: str, output: asyncio.StreamReader) -> None:
        """Whole lines, so that those of two servers do not mix."""
        prefix = f"[{name}] ".encode()
        pending = b""
        while part := await output.read(self._limits.max_log_line_bytes):
            *lines, pending = (pending + part).split(b"\n")
            if len(pending) > self._limits.max_log_line_bytes:
                lines, pending = [*lines, pending], b""
            if lines:
                self._write_log(b"".join(prefix + line + b"\n" for line in lines))
        if pending:
            self._write_log(prefix + pending + b"\n")
