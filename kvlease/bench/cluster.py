"""A whole cluster beside one process: the same model, the same prompts, as many threads, one request at a time, turn by turn.

The one process is the bare engine: no HTTP, no tokenizer, no second process. What the cluster adds to it is what is measured.

Never: lets both work at the same time.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from random import Random

from kvlease.bench.errors import BenchFailed
from kvlease.bench.figures import Figure, Notes
from kvlease.bench.limits import Limits
from kvlease.bench.serve.answers import Sighting
from kvlease.bench.serve.client import Asking, Client
from kvlease.bench.serve.limits import Limits as LoadLimits
from kvlease.bench.servers import server
from kvlease.engine.batch import Draw, SequenceStep
from kvlease.engine.runner import ModelRunner
from kvlease.engine.threads import set_threads
from kvlease.kvcache.sizing import blocks_for
from kvlease.sampling.params import SamplingParams

_BLOCK_SIZE = 16
_CHUNK_TOKENS = 512
_POOL_TOKENS = 8192
_ALLOWED = 1.10  # of one process's first token; what lies beyond is a figure of its own


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """`starts`: of the cluster, each to its first ready answer. `threads`: of each engine, and of the one process."""

    model: Path
    threads: int = 1
    starts: int = 3
    rounds: int = 5
    prompt_tokens: tuple[int, ...] = (128, 1024)
    max_tokens: int = 32

    def __post_init__(self) -> None:
        """Refuse what has nothing to measure."""
        if min(self.threads, self.starts, self.rounds, *self.prompt_tokens) < 1 or self.max_tokens < 2:
            raise ValueError(f"everything is at least 1, and an answer has 2 tokens or more, got {self}")
        if max(self.prompt_tokens) + self.max_tokens > _POOL_TOKENS:
            raise ValueError(f"prompt and answer have at most {_POOL_TOKENS} tokens, got {self}")


async def measure_cluster(plan: ClusterPlan, limits: Limits, advance: Callable[[], None]) -> list[Figure]:
    """Starts in seconds, times in milliseconds, and ratios to one process; `advance` is called once a start and round."""
    notes = Notes()
    blocks = str(blocks_for(_POOL_TOKENS, _BLOCK_SIZE))
    sizes = ("--prefill-blocks", blocks, "--decode-blocks", blocks, "--threads", str(plan.threads))
    flags = ("--model", str(plan.model), "--port", "0", "--dtype", "float32", "--log-level", "error", *sizes)
    for number in range(plan.starts):
        async with server("serve", flags, limits, threads=plan.threads) as served:
            notes.add("start to ready", "s", served.start_s, {})
            advance()
            if number == plan.starts - 1:
                await _compare(plan, served.where, notes, advance)
    return notes.figures()


async def _compare(plan: ClusterPlan, url: str, notes: Notes, advance: Callable[[], None]) -> None:
    client = Client(Asking(url), LoadLimits())
    await client.find_model()
    alone = OneProcess(plan)
    random = Random(0)  # noqa: S311  prompts, not secrets
    for num_tokens in plan.prompt_tokens:
        labels = {"prompt": f"{num_tokens} tokens"}
        for number in range(plan.rounds + 1):  # the first one warms up
            prompt = tuple(random.randrange(10, 250) for _ in range(num_tokens))
            seen = await client.ask(prompt, plan.max_tokens)
            own = alone.generate(prompt)
            if number:
                _note(notes, labels, _checked(seen), own)
            advance()


def _checked(seen: Sighting) -> tuple[float, float]:
    """First token and time per token after it (s) of a good answer."""
    per_token_s = seen.per_token_s
    if seen.error or per_token_s is None:
        raise BenchFailed(f"a request to the cluster failed: {seen.error or 'it had one token'}")
    return seen.first_token_s, per_token_s


def _note(notes: Notes, labels: dict[str, str], cluster: tuple[float, float], alone: tuple[float, float]) -> None:
    for name, first_s, per_token_s in (("cluster", *cluster), ("one process", *alone)):
        notes.add(f"{name}: first token", "ms", first_s * 1e3, labels)
        notes.add(f"{name}: per token", "ms", per_token_s * 1e3, labels)
    notes.add("first token to one process", "ratio", cluster[0] / alone[0], labels)
    notes.add("first token beyond +10 %", "ms", (cluster[0] - _ALLOWED * alone[0]) * 1e3, labels)
    notes.add("per token to one process", "ratio", cluster[1] / alone[1], labels)


class OneProcess:
    """The engine in this process, with a pool for one sequence."""

    def __init__(self, plan: ClusterPlan) -> None:
        """Load the model."""
        set_threads(plan.threads)
        num_blocks = blocks_for(_POOL_TOKENS, _BLOCK_SIZE)
        self._runner = ModelRunner.load(
            plan.model, dtype="float32", device="cpu", num_blocks=num_blocks, block_size=_BLOCK_SIZE
        )
        self._max_tokens = plan.max_tokens
        self._sequence_id = 0

    def generate(self, prompt: tuple[int, ...]) -> tuple[float, float]:
        """First token, and time per token after it (s), greedy, in the chunks that the servers use."""
        self._sequence_id += 1
        table = tuple(range(blocks_for(len(prompt) + self._max_tokens, _BLOCK_SIZE)))
        self._runner.ledger.clear(table)
        started = time.monotonic()
        token = 0
        for first in range(0, len(prompt), _CHUNK_TOKENS):
            token = self._step(
                table, first, prompt[first : first + _CHUNK_TOKENS], first + _CHUNK_TOKENS >= len(prompt)
            )
        first_token = time.monotonic()
        for length in range(len(prompt), len(prompt) + self._max_tokens - 1):
            token = self._step(table, length, (token,), True)
        return first_token - started, (time.monotonic() - first_token) / (self._max_tokens - 1)

    def _step(self, table: tuple[int, ...], length: int, tokens: tuple[int, ...], is_last: bool) -> int:
        context = self._runner.ledger.readable(self._sequence_id, table, length)
        (drawn,) = self._runner.run([SequenceStep(context, tokens, (Draw(SamplingParams()),) if is_last else ())])
        return drawn[0].token_id if drawn else 0
