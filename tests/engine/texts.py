"""Driving a runner in tests: one object for each text, and the reference that it is compared with."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from kvlease.engine.attention import AttentionStep
from kvlease.engine.batch import Draw, SequenceStep
from kvlease.engine.loading import CausalModel, CausalOutput
from kvlease.engine.runner import ModelRunner
from kvlease.sampling.params import SamplingParams
from kvlease.sampling.tokens import DrawnToken

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "mixtral")
GREEDY = Draw(SamplingParams())
#: Of float32 logits of size ten, over two layers: a thousand times what rounding makes of them in any order of sums.
CLOSE = 1e-3

_numbers = itertools.count(1)


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids that are no special tokens."""
    return tuple(np.random.default_rng(seed).integers(0, 290, length).tolist())


class Text:
    """One sequence in the pool of `runner`."""

    def __init__(self, runner: ModelRunner, table: Sequence[int]) -> None:
        """A sequence without tokens, which owns the blocks of `table`."""
        self.runner = runner
        self.sequence_id = next(_numbers)
        self.table = tuple(table)
        self.num_tokens = 0
        runner.ledger.clear(self.table)

    def step(self, token_ids: Sequence[int], sampling: Draw | None = GREEDY) -> SequenceStep:
        """The next step, to be followed by `grew`."""
        context = self.runner.ledger.readable(self.sequence_id, self.table, self.num_tokens)
        return SequenceStep(context, tuple(token_ids), () if sampling is None else (sampling,))

    def run(self, token_ids: Sequence[int], sampling: Draw | None = GREEDY) -> int | None:
        """A pass of its own."""
        (token,) = run_together(((self, token_ids),), sampling)
        return token

    def prefill(self, token_ids: Sequence[int], chunk: int, sampling: Draw = GREEDY) -> int:
        """All of a prompt, `chunk` tokens a pass; the first token of the answer."""
        token = None
        for first in range(0, len(token_ids), chunk):
            part = token_ids[first : first + chunk]
            token = self.run(part, sampling if first + chunk >= len(token_ids) else None)
        assert token is not None
        return token

    def generate(self, token_ids: Sequence[int], count: int, chunk: int = 1 << 20) -> list[int]:
        """`count` greedy tokens."""
        tokens = [self.prefill(token_ids, chunk)]
        while len(tokens) < count:
            token = self.run(tokens[-1:])
            assert token is not None
            tokens.append(token)
        return tokens

    def kv_bytes(self) -> bytes:
        """Everything that this text has in the storage."""
        return bytes(self.runner.storage.read_canonical(self.table, 0, self.num_tokens))


def run_together(parts: Sequence[tuple[Text, Sequence[int]]], sampling: Draw | None = GREEDY) -> tuple[int | None, ...]:
    """One pass over all of them."""
    results = parts[0][0].runner.run([text.step(token_ids, sampling) for text, token_ids in parts])
    for text, token_ids in parts:
        text.num_tokens += len(token_ids)
    return tuple(the_token(drawn) for drawn in results)


def the_token(drawn: tuple[DrawnToken, ...]) -> int | None:
    """The one that a step drew."""
    assert len(drawn) <= 1
    return drawn[0].token_id if drawn else None


class SpiedModel:
    """The runner's model, keeping the logits of the last pass; or failing in the middle of one when `fails_at_layer` is set."""

    def __init__(self, model: CausalModel) -> None:
        """Spy on `model`."""
        self._model = model
        self.logits = torch.empty(0)
        self.spoiled_rows: tuple[int, ...] = ()
        self.fails_at_layer: int | None = None

    def __call__(
        self,
        *,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        use_cache: bool,
        logits_to_keep: torch.Tensor,
        attention_step: AttentionStep,
    ) -> CausalOutput:
        """The model's own answer, spoiled as asked for."""
        step = attention_step if self.fails_at_layer is None else _Failing(attention_step, self.fails_at_layer)
        output = self._model(
            input_ids=input_ids,
            position_ids=position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            attention_step=step,
        )
        self.logits = output.logits[0].clone()
        for row in self.spoiled_rows:
            output.logits[0, row, 3] = float("nan")
        return output


class _Failing:
    """Attention that writes as it should and raises at one layer, as a device out of memory would."""

    def __init__(self, step: AttentionStep, layer: int) -> None:
        self._step = step
        self._layer = layer
        self.pulse = step.pulse

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        output = self._step.attend(layer, query, key, value, scaling)
        if layer == self._layer:
            raise RuntimeError("no memory left on the device")
        return output


def spied(runner: ModelRunner) -> tuple[ModelRunner, SpiedModel]:
    """The same runner, with a spy between it and its model."""
    spy = SpiedModel(runner._model)
    return ModelRunner(spy, runner.facts, runner.storage, runner.ledger), spy


class Reference:
    """The same model in `transformers` alone, with its own attention and cache."""

    def __init__(self, folder: Path) -> None:
        """Load it."""
        with _quietly():
            self._model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)  # in evaluation mode

    def logits(self, token_ids: Sequence[int]) -> torch.Tensor:
        """[tokens, vocabulary]"""
        with torch.inference_mode():
            output: torch.Tensor = self._model(torch.tensor([list(token_ids)])).logits[0]
        return output

    def generate(self, token_ids: Sequence[int], count: int) -> list[int]:
        """`count` greedy tokens."""
        ids = torch.tensor([list(token_ids)])
        with torch.inference_mode():
            output = self._model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False,
                eos_token_id=None, pad_token_id=0,
            )  # fmt: skip
        tokens: list[int] = output[0, len(token_ids) :].tolist()
        return tokens


@functools.cache
def reference(folder: Path) -> Reference:
    """One for each folder."""
    return Reference(folder)


@contextmanager
def _quietly() -> Iterator[None]:
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        logging.enable_progress_bar()  # type: ignore[no-untyped-call]
