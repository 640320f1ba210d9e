"""The Docker engine that a trial runs on: the one that answers, or one of our own that ends with the trial.

Our own needs root. Its socket and state are in a temporary folder; its images and layers are in the cache, so that a second trial
builds only what has changed.

Never: touches an engine that was there, beyond the images, containers and volumes of the trial; ends a process by its name.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from deploy.trial.commands import NoEngine, attempt, install, say, wait_for

_PR_SET_PDEATHSIG = 1  # prctl(2)
_START_S, _STOP_S = 60, 45
_LOG_LINES = 15


def engine_fault() -> str | None:
    """Why no engine answers where DOCKER_HOST or the default points; None: one does."""
    status, output = attempt(["docker", "version", "--format", "{{.Server.Version}}"], within_s=20)
    return None if status == 0 else (output.strip().splitlines() or ["docker version takes too long"])[-1]


@contextmanager
def engine(cache: Path, *, own: bool, is_root: bool) -> Iterator[None]:
    """An engine that answers, and DOCKER_HOST set to it. `own`: start one even where another answers, which needs root."""
    fault = engine_fault()
    if fault is None and not own:
        say("using the engine that answers")
        yield
        return
    if not is_root:
        raise NoEngine(f"no Docker engine answers ({fault}), and only root can start one")
    with own_engine(cache):
        yield


@contextmanager
def own_engine(cache: Path) -> Iterator[None]:
    """One that we start and end."""
    if missing := [package for program, package in _NEEDS if shutil.which(program) is None]:
        install(*missing)
    state = cache / "engine"
    state.mkdir(parents=True, exist_ok=True)
    before = os.environ.get("DOCKER_HOST")
    with (cache / "engine.lock").open("w") as lock, tempfile.TemporaryDirectory(prefix="kvlease-docker-") as folder:
        fcntl.flock(lock, fcntl.LOCK_EX)  # two engines must not share their state
        process = _start(state, Path(folder))
        os.environ["DOCKER_HOST"] = f"unix://{folder}/socket"
        try:
            seconds = wait_for(
                lambda: process.poll() is not None or engine_fault() is None, within_s=_START_S, what="the engine"
            )
            if process.poll() is not None:
                raise NoEngine(f"dockerd does not run here:\n{_end_of(Path(folder) / 'log')}")
            say(f"started an engine of our own in {seconds:.1f} s")
            yield
        finally:
            _stop(process)
            if before is None:
                del os.environ["DOCKER_HOST"]
            else:
                os.environ["DOCKER_HOST"] = before


_NEEDS = (("dockerd", "docker.io"), ("docker", "docker.io"), ("iptables", "iptables"))


def _start(state: Path, folder: Path) -> subprocess.Popen[bytes]:
    words = ["dockerd", "--data-root", str(state), "--exec-root", str(folder / "exec")]
    # Without a driver of layers each step of a build would be a copy of the whole image: then better no engine.
    words += ["--storage-driver", "overlay2"]
    words += ["--pidfile", str(folder / "pid"), "--host", f"unix://{folder}/socket"]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(
            words,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,  # Ctrl-C is for us; we then end it in order
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    """If we are killed, the engine ends, and it its containers."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # it and its containerd: the session that we made
        process.wait()


def _end_of(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(f"    {line}" for line in lines[-_LOG_LINES:])
