"""Threads are bounded before torch is there to make them."""

from __future__ import annotations

import subprocess
import sys


def output_of(program: str) -> str:
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60)
    return done.stdout + done.stderr


def test_the_environment_is_prepared_without_torch() -> None:
    program = """
import os, sys
from kvlease.engine.threads import prepare_environment
prepare_environment(3)
print(os.environ["OMP_NUM_THREADS"], os.environ["MKL_NUM_THREADS"], "torch" in sys.modules)
"""
    assert output_of(program) == "3 3 False\n"


def test_preparing_the_environment_too_late_is_a_mistake() -> None:
    program = """
import torch
from kvlease.engine.threads import prepare_environment
prepare_environment(3)
"""
    assert "too late" in output_of(program)
