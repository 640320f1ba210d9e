"""What the engine's passes cost in one process, beside the same model run by `transformers` alone, round by round.

Never: measures a first pass; each kind of pass has run before its first round.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar

from kvlease.bench.figures import Figure, Notes
from kvlease.bench.idle_model import IdleModel, pass_over
from kvlease.engine.batch import Draw, SequenceStep
from kvlease.engine.runner import ModelRunner
from kvlease.engine.threads import set_threads
from kvlease.kvcache.sizing import blocks_for
from kvlease.sampling.params import SamplingParams

BLOCK_SIZE = 16
_FIRST_TOKEN_ID = 10  # no special one, in any vocabulary that is served


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """`contexts`: lengths (tokens) at which a step of one and of `num_sequences` sequences is measured, shortest first."""

    model: Path
    threads: int = 1
    rounds: int = 5
    prompt_tokens: int = 128
    num_sequences: int = 16
    contexts: tuple[int, ...] = (128, 1024)

    def __post_init__(self) -> None:
        """Refuse what has nothing to measure."""
        if min(self.threads, self.rounds, self.prompt_tokens, self.num_sequences, *self.contexts) < 1:
            raise ValueError(f"everything is at least 1, got {self}")


def measure_engine(plan: EnginePlan, advance: Callable[[], None]) -> list[Figure]:
    """Milliseconds of each pass, and the ratios between them; `advance` is called once a round. All in float32."""
    set_threads(plan.threads)
    passes = {**_plain_passes(plan), **_our_passes(plan)}
    for run in passes.values():
        run()
    notes = Notes()
    for _ in range(plan.rounds):
        seen = {}
        for name, run in passes.items():
            started = time.monotonic()
            run()
            seen[name] = time.monotonic() - started
            notes.add(name, "ms", seen[name] * 1e3, {})
        for name, value in _ratios(plan, seen).items():
            notes.add(name, "ratio", value, {})
        advance()
    return notes.figures()


def _ratios(plan: EnginePlan, seen: dict[str, float]) -> dict[str, float]:
    short, *longer = plan.contexts
    count = plan.num_sequences
    ratios = {
        "prefill to transformers": seen["prefill"] / seen["transformers prefill"],
        "step to transformers": seen[_step_name(1, short)] / seen["transformers step"],
    }
    for length in longer:
        ratios[f"step of {count}: {length} to {short} tokens"] = (
            seen[_step_name(count, length)] / seen[_step_name(count, short)]
        )
    return ratios


def _step_name(num_sequences: int, length: int) -> str:
    return f"step of {num_sequences} at {length} tokens"


def _plain_passes(plan: EnginePlan) -> dict[str, Callable[[], object]]:
    """The yardsticks: prefill of a prompt, and one decode step behind it, with the model's own cache."""
    disable_progress_bar()  # type: ignore[no-untyped-call]
    model = AutoModelForCausalLM.from_pretrained(  # in evaluation mode, as it always is then
        plan.model, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    )
    model.requires_grad_(False)
    prompt = torch.full((1, plan.prompt_tokens), _FIRST_TOKEN_ID)
    cache = DynamicCache(config=model.config)
    # Renamed within one major version; the old name still works there, but warns in every pass.
    kept = {"cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values": cache}

    @torch.inference_mode()
    def prefill() -> int:
        output = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
        return int(output.logits[0, -1].argmax())

    @torch.inference_mode()
    def step() -> int:
        if cache.get_seq_length() == 0:
            model(input_ids=prompt, use_cache=True, logits_to_keep=1, **kept)
        output = model(input_ids=prompt[:, :1], use_cache=True, logits_to_keep=1, **kept)
        cache.crop(-1)
        return int(output.logits[0, -1].argmax())

    return {"transformers prefill": prefill, "transformers step": step}


def _our_passes(plan: EnginePlan) -> dict[str, Callable[[], object]]:
    """The same through the runner, and steps of many sequences; their contexts are noise, which costs what a text costs."""
    longest = max(plan.contexts) + 1
    table_blocks = blocks_for(longest, BLOCK_SIZE)
    prompt_blocks = blocks_for(plan.prompt_tokens, BLOCK_SIZE)
    num_tables = plan.num_sequences * len(plan.contexts)
    runner = ModelRunner.load(
        plan.model,
        dtype="float32",
        device="cpu",
        num_blocks=num_tables * table_blocks + prompt_blocks,
        block_size=BLOCK_SIZE,
    )
    for index in range(runner.facts.num_layers):
        for name in ("k", "v"):
            runner.storage.array(index, name).normal_()
    idle = ModelRunner(IdleModel(8), runner.facts, runner.storage, runner.ledger)
    passes: dict[str, Callable[[], object]] = {}
    for group, length in enumerate(plan.contexts):
        first = group * plan.num_sequences
        ids = range(first + 1, first + 1 + plan.num_sequences)
        tables = [tuple(range(table_blocks * (i - 1), table_blocks * i)) for i in ids]
        for sequence_id, table in zip(ids, tables, strict=True):
            pass_over(idle, sequence_id, table, (_FIRST_TOKEN_ID,) * length)
        for count in dict.fromkeys((1, plan.num_sequences)):
            passes[_step_name(count, length)] = _step(runner, ids[:count], tables[:count], length)
    prompt_table = tuple(range(num_tables * table_blocks, num_tables * table_blocks + prompt_blocks))
    return {"prefill": _prefill(runner, num_tables + 1, prompt_table, plan.prompt_tokens), **passes}


def _step(runner: ModelRunner, ids: range, tables: list[tuple[int, ...]], length: int) -> Callable[[], object]:
    def run() -> object:
        readable = runner.ledger.readable
        return runner.run(
            [
                SequenceStep(readable(sequence_id, table, length), (_FIRST_TOKEN_ID,), (Draw(SamplingParams()),))
                for sequence_id, table in zip(ids, tables, strict=True)
            ]
        )

    return run


def _prefill(runner: ModelRunner, sequence_id: int, table: tuple[int, ...], num_tokens: int) -> Callable[[], object]:
    def run() -> object:
        context = runner.ledger.readable(sequence_id, table, 0)
        return runner.run([SequenceStep(context, (_FIRST_TOKEN_ID,) * num_tokens, (Draw(SamplingParams()),))])

    return run
