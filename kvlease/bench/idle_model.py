"""A model that computes nothing, for measurements in which the model's own speed has no place.

Never: writes a key or a value; a pool keeps what is in it.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import torch

from kvlease.engine.batch import Draw, SequenceStep
from kvlease.engine.limits import Limits
from kvlease.engine.loading import CausalOutput
from kvlease.engine.runner import ModelRunner
from kvlease.sampling.params import SamplingParams

#: Of a pass behind the first: its mask, which the runner makes whatever the model does, grows with this and the context.
_PASS_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class IdleModel:
    """Answers every pass at once, with logits of zeros."""

    vocab_size: int

    def __call__(self, *, logits_to_keep: torch.Tensor, **_others: object) -> CausalOutput:
        """Logits [1, rows to keep, vocabulary]."""
        return cast("CausalOutput", SimpleNamespace(logits=torch.zeros(1, len(logits_to_keep), self.vocab_size)))


def pass_over(runner: ModelRunner, sequence_id: int, table: tuple[int, ...], tokens: tuple[int, ...]) -> None:
    """Have `runner`, whose model is idle, prove a whole prompt."""
    first = 0
    while first < len(tokens):
        part = tokens[first : first + (_PASS_TOKENS if first else Limits().max_step_tokens)]
        context = runner.ledger.readable(sequence_id, table, first)
        first += len(part)
        runner.run([SequenceStep(context, part, (Draw(SamplingParams()),) if first == len(tokens) else ())])
