"""What a pair of servers writes is what `transformers` would have written, and decode reads what prefill computed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from kvlease.engine.loading import load_model
from kvlease.models.chat_template import ChatTemplate
from kvlease.models.facts import ModelFacts
from kvlease.models.fetch import DEFAULT_MODEL, prepare_model
from kvlease.models.tiny import make_tiny_model
from kvlease.models.tokenizer import Tokenizer
from tests.oracle.pair import Loaded, Setting, running_pair
from tests.oracle.prompts import real_prompts

torch.set_num_threads(1)

NUM_NEW = 32
TOLERANCE = 0.001  # between logits: sums of float32 in another order differ by about a tenth of it
POOL_TOKENS = 6_000  # of each side: all prompts at once

Prompt = tuple[int, ...]
Text = tuple[Prompt, tuple[int, ...]]


@dataclass(slots=True)
class Oracle:
    """Scores texts by one forward pass of `transformers` each; a text that was scored before is not computed again."""

    model: Any
    num_tolerated: dict[Text, int] = field(default_factory=dict)

    def score(self, prompt: Prompt, output: tuple[int, ...]) -> int:
        """How many tokens needed the tolerance; fails if one is worse than that."""
        text = (prompt, output)
        if text not in self.num_tolerated:
            with torch.inference_mode():
                whole = torch.tensor([prompt + output[:-1]])
                logits = self.model(whole, use_cache=False, logits_to_keep=len(output)).logits[0].float()
            gaps = logits.max(dim=-1).values - logits.gather(1, torch.tensor(output)[:, None])[:, 0]
            worst = float(gaps.max())
            assert worst <= TOLERANCE, f"prompt of {len(prompt)}: token {int(gaps.argmax())} is {worst} below the best"
            self.num_tolerated[text] = int((gaps > 0).sum())
        return self.num_tolerated[text]

    def score_all(self, prompts: Sequence[Prompt], outputs: Sequence[tuple[int, ...]]) -> int:
        assert [len(output) for output in outputs] == [NUM_NEW] * len(prompts)
        return sum(self.score(prompt, output) for prompt, output in zip(prompts, outputs, strict=True))


@pytest.fixture(scope="session")
def default_folder() -> Path:
    return prepare_model(DEFAULT_MODEL)


@pytest.fixture(scope="session")
def loaded(default_folder: Path) -> Loaded:
    return load(default_folder, "float32")


@pytest.fixture(scope="session")
def prompts(default_folder: Path) -> tuple[Prompt, ...]:
    template = ChatTemplate.load(default_folder)
    assert template is not None
    return real_prompts(Tokenizer.load(default_folder), template)


@pytest.fixture(scope="session")
def oracle(default_folder: Path) -> Oracle:
    import transformers

    from_pretrained: Any = transformers.AutoModelForCausalLM.from_pretrained
    return Oracle(from_pretrained(default_folder, dtype=torch.float32).eval())


def load(folder: Path, dtype: str) -> Loaded:
    facts = ModelFacts.read(folder)
    return Loaded(folder, facts, load_model(folder, facts.family, dtype, torch.device("cpu")), dtype)


def at_once(loaded: Loaded, setting: Setting, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    async def generate() -> list[tuple[int, ...]]:
        async with running_pair(loaded, setting, POOL_TOKENS) as pair:
            return await pair.generate_all(prompts, NUM_NEW)

    return asyncio.run(generate())


def alone(loaded: Loaded, setting: Setting, prompts: Sequence[Prompt]) -> list[tuple[int, ...]]:
    async def generate() -> list[tuple[int, ...]]:
        async with running_pair(loaded, setting, POOL_TOKENS) as pair:
            return [await pair.generate(prompt, NUM_NEW) for prompt in prompts]

    return asyncio.run(generate())


@pytest.mark.model
def test_the_prompts_are_of_all_lengths(prompts: tuple[Prompt, ...]) -> None:
    lengths = [len(prompt) for prompt in prompts]
    assert len(set(prompts)) == 20
    assert min(lengths) == 1
    assert 1_900 <= max(lengths) <= 2_000


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("send", [at_once, alone])
def test_every_token_is_the_best_of_transformers(
    send: Callable[[Loaded, Setting, Sequence[Prompt]], list[tuple[int, ...]]],
    loaded: Loaded,
    prompts: tuple[Prompt, ...],
    oracle: Oracle,
    record_property: Callable[[str, object], None],
) -> None:
    outputs = send(loaded, Setting(), prompts)
    num_tolerated = oracle.score_all(prompts, outputs)
    print(f"{send.__name__}: {len(prompts)} prompts of {NUM_NEW} new tokens, tolerance used {num_tolerated} times")
    record_property("uses_of_the_tolerance", num_tolerated)


@pytest.mark.model
@pytest.mark.slow
def test_the_oracle_refuses_a_single_token_that_is_not_the_best(
    loaded: Loaded, prompts: tuple[Prompt, ...], oracle: Oracle
) -> None:
    prompt = min(prompts, key=len)
    [output] = at_once(loaded, Setting(), [prompt])
    oracle.score(prompt, output)
    for place in (0, NUM_NEW // 2, NUM_NEW - 1):
        spoiled = (*output[:place], output[place] + 1, *output[place + 1 :])
        with pytest.raises(AssertionError, match="below the best"):
            oracle.score(prompt, spoiled)


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    "setting", [Setting(block_size=8), Setting(block_size=32), Setting(chunk_tokens=64), Setting(transport="memory")]
)
def test_block_size_chunk_and_transport_change_no_token(
    setting: Setting,
    loaded: Loaded,
    prompts: tuple[Prompt, ...],
    oracle: Oracle,
    record_property: Callable[[str, object], None],
) -> None:
    some = sorted(prompts, key=len)[1::4]  # the longest of them takes several chunks
    outputs = at_once(loaded, setting, some)
    record_property("uses_of_the_tolerance", oracle.score_all(some, outputs))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_decode_reads_the_bytes_that_prefill_computed(dtype: str, tmp_path: Path) -> None:
    tiny = load(make_tiny_model(tmp_path, seed=3), dtype)
    lengths = (1, 15, 16, 17, 100, 600)
    prompts = [tuple(3 + (7 * place + length) % 200 for place in range(length)) for length in lengths]

    async def compare() -> None:
        async with running_pair(tiny, Setting(), 2_000) as pair:
            await pair.generate_all(prompts, 4)
            assert sorted(pair.prefill.blocks) == sorted(pair.decode.blocks) == sorted(lengths)
            assert pair.decode.blocks == pair.prefill.blocks
            assert all(any(block) for blocks in pair.decode.blocks.values() for block in blocks)

    asyncio.run(compare())
