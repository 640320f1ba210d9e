"""`kvlease serve` as a real process over real (stub) servers."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from kvlease.cli.limits import Limits
from tests.cli.serving import BOUND_S, ROOT, Serving, is_running, wait_for


def test_starts_tier_by_tier_and_prints_exactly_one_line(tmp_path: Path) -> None:
    with Serving(tmp_path, "--port", "0", "--prefill-servers", "2", "--decode-servers", "2") as serving:
        serving.wait_until_ready()
        started = [entry["command"] for entry in serving.entries("started")]
        port = serving.entries("listening", "gateway")[0]["port"]
        assert started == ["prefill", "prefill", "decode", "decode", "gateway"]
        assert serving.out == (
            f"kvlease is ready: http://127.0.0.1:{port}/v1  (model stub-model, context 1024, transport tcp)\n"
        )
        wait_for(lambda: "[prefill-1] a line of log\n" in serving.err, "a log line under its server's name")


def test_the_secret_is_drawn_anew_and_is_in_no_command_line_or_environment(tmp_path: Path) -> None:
    with Serving(tmp_path, "--port", "0") as serving:
        serving.wait_until_ready()
        assert len({entry["secret"] for entry in serving.entries("started")}) == 1
        for pid in serving.pids():
            environ = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            assert not [entry for entry in environ if entry.startswith(b"KVLEASE_")]
            assert b"OMP_NUM_THREADS=1" in environ
            assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[3:] == [b"--supervised", b""]


@pytest.mark.parametrize("command", ["prefill", "decode", "gateway"])
def test_a_dead_server_comes_back_on_its_port(tmp_path: Path, command: str) -> None:
    with Serving(tmp_path, "--port", "0") as serving:
        serving.wait_until_ready()
        before = serving.entries("listening", command)[0]
        os.kill(before["pid"], signal.SIGKILL)
        wait_for(lambda: len(serving.entries("listening", command)) == 2, "the second start")
        after = serving.entries("listening", command)[1]
        assert after["port"] == before["port"]
        assert after["pid"] != before["pid"]
        assert len(serving.entries("started")) == 4, "nothing else was restarted"
        assert serving.out.count("\n") == 1


def test_servers_die_with_a_parent_that_is_killed_even_if_they_ignore_sigterm(tmp_path: Path) -> None:
    with Serving(tmp_path, "--port", "0", decode="ignore_sigterm") as serving:
        serving.wait_until_ready()
        serving.process.kill()
        wait_for(lambda: not any(map(is_running, serving.pids())), "every server is gone")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_one_signal_drains_gateway_then_decode_then_prefill(tmp_path: Path, number: signal.Signals) -> None:
    with Serving(tmp_path, "--port", "0") as serving:
        serving.wait_until_ready()
        serving.process.send_signal(number)
        assert serving.wait_for_exit() == 0
        assert [entry["command"] for entry in serving.entries("told")] == ["gateway", "decode", "prefill"]
        assert not any(map(is_running, serving.pids()))


def test_a_second_signal_kills(tmp_path: Path) -> None:
    with Serving(tmp_path, "--port", "0", "--drain", "600", gateway="ignore_sigterm") as serving:
        serving.wait_until_ready()
        serving.process.send_signal(signal.SIGINT)
        wait_for(lambda: serving.entries("told", "gateway"), "the gateway was told")
        serving.process.send_signal(signal.SIGINT)
        assert serving.wait_for_exit() == 130
        assert not any(map(is_running, serving.pids()))


def test_draining_is_bounded(tmp_path: Path) -> None:
    with Serving(tmp_path, "--port", "0", "--drain", "0.2", gateway="ignore_sigterm") as serving:
        serving.wait_until_ready()
        serving.process.send_signal(signal.SIGTERM)
        assert serving.wait_for_exit() == 1
        assert not any(map(is_running, serving.pids()))


def test_a_server_that_refuses_its_configuration_ends_the_whole_with_its_line(tmp_path: Path) -> None:
    with Serving(tmp_path, "--port", "0", decode="refuse") as serving:
        assert serving.wait_for_exit() == 2
        assert "kvlease: decode-0: the stub does not like its configuration\n" in serving.err
        assert serving.out == ""
        assert not serving.entries("started", "gateway")
        assert not any(map(is_running, serving.pids()))


def test_a_server_that_never_starts_is_given_up(tmp_path: Path) -> None:
    with Serving(tmp_path, "--port", "0", prefill="die") as serving:
        assert serving.wait_for_exit() == 1
        num_starts = Limits().max_failed_starts
        assert len(serving.entries("started")) == num_starts
        assert f"prefill-0 failed to start {num_starts} times, giving up: ended with exit code 7" in serving.err


def test_a_port_in_use_is_one_line_before_anything_is_prepared(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with Serving(tmp_path, "--port", str(port)) as serving:
            assert serving.wait_for_exit() == 2
            assert serving.err == (
                f"kvlease: --port {port}: cannot listen on 127.0.0.1:{port}: Address already in use;"
                " free it, or choose another with --port\n"
            )
            assert not serving.journal.exists()


def test_the_ready_line_knows_the_context_behind_an_api_key(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 acme\nk2 globex\n")
    with Serving(tmp_path, "--port", "0", "--api-keys-file", str(keys), gateway="ask_for_k1") as serving:
        serving.wait_until_ready()
        assert "(model stub-model, context 1024, transport tcp)" in serving.out


def test_a_context_that_does_not_fit_starts_nothing(tmp_path: Path) -> None:
    with Serving(tmp_path, "--port", "0", "--max-model-len", "1024", "--prefill-blocks", "43") as serving:
        assert serving.wait_for_exit() == 2
        assert serving.err.count("\n") == 1
        assert "--max-model-len 1024" in serving.err
        assert "688" in serving.err
        assert not serving.journal.exists()


STUB_SERVER = (sys.executable, str(Path(__file__).with_name("stub_server.py")), "prefill", "--supervised")


def start_under_test(tmp_path: Path, program: Sequence[str], parent_pid: int | None) -> subprocess.Popen[bytes]:
    """Start `program`, hand a stub server's document to its stdin, and wait until that server listens or is gone.

    `parent_pid` is what the document says; None: `program` itself is the server's parent.
    """
    report_in, report_out = os.pipe()
    process = subprocess.Popen(
        program,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        pass_fds=(report_out,),
        env={**os.environ, "PYTHONPATH": str(ROOT), "STUB": f'{{"journal": "{tmp_path / "journal"}"}}'},
    )
    os.close(report_out)
    config = {"host": "127.0.0.1", "port": 0, "secret": "s"}
    document = {"log_level": "info", "report_fd": report_out, "config": config, "parent_pid": parent_pid or process.pid}
    assert process.stdin is not None
    process.stdin.write(json.dumps(document).encode() + b"\n")
    process.stdin.flush()
    with os.fdopen(report_in) as reports:
        reports.readline()
    return process


def test_a_server_ends_when_its_end_of_the_pipe_does(tmp_path: Path) -> None:
    process = start_under_test(tmp_path, STUB_SERVER, os.getpid())
    assert process.poll() is None
    assert process.stdin is not None
    process.stdin.close()
    assert process.wait(BOUND_S) == -signal.SIGKILL


def test_a_server_whose_parent_changed_while_it_started_does_not_run(tmp_path: Path) -> None:
    process = start_under_test(tmp_path, STUB_SERVER, os.getpid() + 1)
    assert process.wait(BOUND_S) == 1
    assert not (tmp_path / "journal").exists()


def test_the_kernel_ends_a_server_whose_parent_died_though_its_pipe_is_still_open(tmp_path: Path) -> None:
    between = f"import subprocess; subprocess.run({STUB_SERVER!r}, close_fds=False)"
    parent = start_under_test(tmp_path, (sys.executable, "-c", between), None)
    [pid] = [json.loads(line)["pid"] for line in (tmp_path / "journal").read_text().splitlines()[:1]]
    assert is_running(pid)
    parent.kill()
    parent.wait(BOUND_S)
    wait_for(lambda: not is_running(pid), "the server is gone")
