"""Child processes of a preparation."""

import os
import sys
import time
from pathlib import Path

from kvlease.models.child import run_child


def run(tmp_path: Path, program: str, limit_s: float = 30.0) -> tuple[bool, str, int]:
    ticks: list[None] = []
    outcome = run_child(
        [sys.executable, "-c", program], os.environ, tmp_path / "log", limit_s, lambda: ticks.append(None)
    )
    return outcome.succeeded, outcome.complaint, len(ticks)


def test_output_is_kept_apart_and_the_last_complaint_is_told(tmp_path: Path) -> None:
    program = "import sys; print('step'); sys.stderr.write('noise\\nwhat is wrong\\n\\n'); sys.exit(3)"
    assert run(tmp_path, program)[:2] == (False, "what is wrong")
    assert (tmp_path / "log.out").read_text() == "step\n"


def test_a_silent_failure_has_its_status(tmp_path: Path) -> None:
    assert run(tmp_path, "import os; os._exit(7)")[:2] == (False, "exit status 7")


def test_it_ticks_while_it_waits(tmp_path: Path) -> None:
    succeeded, _, num_ticks = run(tmp_path, "import time; time.sleep(0.7)")
    assert succeeded
    assert num_ticks >= 2


def test_a_child_that_takes_too_long_is_ended(tmp_path: Path) -> None:
    program = f"import os, time; open({str(tmp_path / 'pid')!r}, 'w').write(str(os.getpid())); time.sleep(30)"
    begin = time.monotonic()
    succeeded, complaint, _ = run(tmp_path, program, limit_s=1.0)
    assert time.monotonic() - begin < 20
    assert (succeeded, complaint) == (False, "it took more than 1 s")
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
