"""The built wheel, installed with its pinned packages into an environment of its own, serves from another folder."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from kvlease.models.tiny import make_tiny_model
from tests.whole.serving import served

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_wheel_serves_from_another_folder(tmp_path: Path) -> None:
    pip(sys.executable, "wheel", "--no-deps", "--wheel-dir", str(tmp_path), str(ROOT))
    [wheel] = tmp_path.glob("kvlease-*.whl")
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "fresh"], check=True, timeout=120)
    pip(str(tmp_path / "fresh/bin/python"), "install", str(wheel))
    model = make_tiny_model(tmp_path / "tiny", seed=5)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    command = ("env", "--chdir", str(elsewhere), "--unset", "PYTHONPATH", str(tmp_path / "fresh/bin/kvlease"))
    with served(tmp_path, "--model", str(model), command=command) as cluster:
        assert b"fresh/bin/python" in Path(f"/proc/{cluster.process.pid}/cmdline").read_bytes()
        body = json.dumps({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4}).encode()
        request = urllib.request.Request(f"{cluster.url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert json.load(answer)["usage"]["completion_tokens"] == 4


def pip(python: str, *words: str) -> None:
    environ = os.environ | {"PIP_CONSTRAINT": str(ROOT / "requirements/lock.txt"), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(
        [python, "-m", "pip", "--quiet", "--no-input", *words],
        env=environ,
        cwd=Path(python).parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
