"""Runs a batch such that what breaks one sequence ends that one alone.

Never: gives a token for a step that did not complete.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlease.engine.batch import SequenceStep
from kvlease.engine.errors import EngineFailed, LogitsNotFinite
from kvlease.kvcache.errors import UnprovenSlot
from kvlease.sampling.tokens import DrawnToken


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a step has no result."""

    message: str


Result = tuple[DrawnToken, ...] | Failure


class Runner(Protocol):
    """What runs a packed batch; `ModelRunner` is one."""

    def run(self, steps: Sequence[SequenceStep]) -> tuple[tuple[DrawnToken, ...], ...]:
        """The drawn tokens of each step, in the order of its draws."""


def run_isolated(runner: Runner, steps: Sequence[SequenceStep]) -> list[Result]:
    """The result of each step. After a failed pass each step is run again alone: its slots are unproven, so that is safe."""
    try:
        return list(runner.run(steps))
    except LogitsNotFinite as error:
        failed = set(error.failed)
        return [Failure(str(error)) if i in failed else drawn for i, drawn in enumerate(error.drawn)]
    except (EngineFailed, UnprovenSlot) as error:
        if len(steps) == 1:
            return [Failure(str(error))]
        return [result for step in steps for result in run_isolated(runner, [step])]
