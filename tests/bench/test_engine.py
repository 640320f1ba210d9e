"""`kvlease bench engine` and `kvlease bench cluster` with a tiny model, as a user runs them: each in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

pytestmark = pytest.mark.slow

#: Five times what a warm start of the default model may take.
MOST_START_S = 5 * 15.0


def measured(*words: str) -> dict[str, dict[str, Any]]:
    """Figures by name; those of the last label where there are several."""
    command = [sys.executable, "-m", "kvlease", "bench", *words, "--json"]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return {figure["name"]: figure for figure in json.loads(done.stdout)["figures"]}


def test_passes_are_measured_beside_transformers() -> None:
    figures = measured("engine", "--model", "tiny", "--rounds", "2", "--sequences", "4", "--contexts", "32", "256")
    assert {"transformers prefill", "transformers step", "prefill", "step of 4 at 256 tokens"} <= set(figures)
    assert all(figure["samples"] == 2 and figure["low"] > 0 for figure in figures.values())
    assert figures["step of 4: 256 to 32 tokens"]["unit"] == "ratio"


def test_a_cluster_is_measured_beside_one_process() -> None:
    flags = ("--model", "tiny", "--starts", "1", "--rounds", "2", "--prompt-tokens", "48", "--max-tokens", "6")
    figures = measured("cluster", *flags)
    assert figures["start to ready"]["median"] < MOST_START_S
    assert figures["cluster: first token"]["samples"] == figures["one process: first token"]["samples"] == 2
    assert figures["cluster: per token"]["median"] > 0 < figures["per token to one process"]["median"]


@pytest.mark.parametrize(
    "words", [("engine", "--rounds", "0"), ("cluster", "--max-tokens", "1"), ("engine", "--model", "none")]
)
def test_what_cannot_be_measured_is_one_line(words: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "kvlease", "bench", *words, *(() if "none" in words else ("--model", "tiny"))]
    done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=60)
    assert (done.returncode != 0, done.stdout, done.stderr.count("\n")) == (True, "", 1), done.stderr
