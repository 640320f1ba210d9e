"""The oracle: text that crossed the border, scored by one plain forward pass of the same model.

Each generated token must be the best by the model's own logits, or within `TOLERANCE` of the best (float32 sums depend on their order).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from kvlease.models.chat_template import ChatTemplate
from kvlease.models.fetch import DEFAULT_MODEL, prepare_model
from kvlease.models.tokenizer import Tokenizer
from tests.cluster.harness import Shape, cluster, request_of

TOLERANCE = 0.001
NUM_NEW = 32
CHATS = (
    "What is the capital of France?",
    "Explain in simple words how a bicycle stays upright.",
    "Schreibe einen Satz über den Herbst.",
    "用一句话介绍北京。",
    "Напиши одно предложение о море.",  # noqa: RUF001 - Russian
    "اكتب جملة عن الصحراء.",
    "日本の首都はどこですか?",
    "Reply with three emoji 🐳🚲🏔️ and why.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "List five uses of a paper clip.",
)
RAW = (
    "A",
    "The quick brown fox",
    "Water boils at",
    "🎉🎊",
    "1, 1, 2, 3, 5, 8,",
    "Ελλάδα είναι",
    "def add(a, b):",
    "Once upon a time, ",
)
STORY = "The keeper of the lighthouse counted the waves and wrote their number into a book. "


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def prompts(folder: Path) -> list[tuple[int, ...]]:
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    assert template is not None
    chats = [template.render([{"role": "user", "content": text}]) for text in CHATS]
    found = [tuple(tokenizer.encode(text, False)) for text in (*chats, *RAW)]
    long = tuple(tokenizer.encode(STORY * 120, False))
    return [*found, long[:600], long[:2000]]


@pytest.fixture(scope="module")
def scorer(folder: Path) -> torch.nn.Module:
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train(False)


def score(scorer: torch.nn.Module, prompt: tuple[int, ...], text: tuple[int, ...]) -> int:
    """Fails unless every token is the best or within the tolerance; returns how often the tolerance was used."""
    with torch.inference_mode():
        logits = scorer(torch.tensor([prompt + text]), logits_to_keep=len(text) + 1).logits[0, :-1]
    gaps = logits.max(-1).values - logits.gather(1, torch.tensor(text)[:, None])[:, 0]
    assert float(gaps.max()) <= TOLERANCE, f"a token is {float(gaps.max())} below the best"
    return int((gaps > 0).sum())


async def texts_of(folder: Path, shape: Shape, prompts: list[tuple[int, ...]], *, alone: bool) -> list[tuple[int, ...]]:
    async with cluster(folder, shape) as running:
        requests = [request_of(prompt, NUM_NEW, remaining_s=240.0) for prompt in prompts]
        if alone:
            return [await running.text(request) for request in requests]
        return list(await asyncio.gather(*(running.text(request) for request in requests)))


@pytest.mark.timeout(600)
@pytest.mark.parametrize("alone", [True, False], ids=["alone", "all at once"])
def test_twenty_real_prompts_get_the_models_own_text(
    folder: Path,
    prompts: list[tuple[int, ...]],
    scorer: torch.nn.Module,
    alone: bool,
    record_property: Callable[[str, object], None],
) -> None:
    assert len(prompts) == 20
    texts = asyncio.run(texts_of(folder, Shape(512, 512), prompts, alone=alone))
    uses = sum(score(scorer, prompt, text) for prompt, text in zip(prompts, texts, strict=True))
    record_property("tolerance_uses", uses)
    print(f"oracle: {len(texts)} texts of {NUM_NEW} tokens, tolerance used {uses} times")


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("block_size", "chunk"), [(8, 512), (32, 512), (16, 64)])
def test_the_text_is_the_same_for_other_blocks_and_chunks(
    folder: Path, prompts: list[tuple[int, ...]], scorer: torch.nn.Module, block_size: int, chunk: int
) -> None:
    some = [prompts[0], prompts[3], prompts[7], prompts[10], prompts[18]]
    blocks = 2048 // block_size
    shape = Shape(blocks, blocks, block_size, block_size, chunk)
    for prompt, text in zip(some, asyncio.run(texts_of(folder, shape, some, alone=False)), strict=True):
        score(scorer, prompt, text)
