"""Same text over RDMA: SmolLM2 through a pair whose blocks travel by a real device, against `transformers` on the same machine.

Run by `scripts/prove`. The default model must be in the cache before: the guest sees it there and cannot fetch it.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch
import transformers

from kvlease.models.chat_template import ChatTemplate
from kvlease.models.fetch import DEFAULT_MODEL, prepare_model
from kvlease.models.tokenizer import Tokenizer
from tests.oracle.pair import Setting, running_pair
from tests.oracle.prompts import real_prompts
from tests.oracle.test_oracle import Oracle, load

NUM_NEW = 6


@pytest.mark.timeout(1500)
def test_smollm2_writes_over_rdma_what_transformers_writes_and_decode_reads_what_prefill_computed() -> None:
    folder = prepare_model(DEFAULT_MODEL)
    template = ChatTemplate.load(folder)
    assert template is not None
    by_length = sorted(real_prompts(Tokenizer.load(folder), template), key=len)
    prompts = [by_length[0], by_length[2], by_length[6]]
    loaded = load(folder, "float32")

    async def generate() -> list[tuple[int, ...]]:
        async with running_pair(loaded, Setting(transport="rdma"), 2_000) as pair:
            texts = await pair.generate_all(prompts, NUM_NEW)
            assert pair.decode.blocks == pair.prefill.blocks
            assert len(pair.decode.blocks) == len(prompts)
            return texts

    outputs = asyncio.run(generate())
    from_pretrained: Any = transformers.AutoModelForCausalLM.from_pretrained
    oracle = Oracle(from_pretrained(folder, dtype=torch.float32).eval())
    num_tolerated = sum(oracle.score(prompt, output) for prompt, output in zip(prompts, outputs, strict=True))
    lengths = ", ".join(str(len(prompt)) for prompt in prompts)
    print(
        f"figures: SmolLM2 over rdma: prompts of {lengths} tokens, {NUM_NEW} new each, tolerance used {num_tolerated} times"
    )
