"""The handoff end to end over a real device: a prefill and a decode server with a toy engine. Run by `tests/rdma/test_guest.py` in the guest."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvlease.handoff.messages import Rejected
from kvlease.models.tiny import make_tiny_model
from tests.cluster.harness import Shape, cluster, prompt_of, request_of
from tests.cluster.toy import ToyRunner, toy_text
from tests.rdma.machine import rdma_instead

LENGTHS = (1, 16, 40, 100)
MAX_TOKENS = 4


@pytest.mark.timeout(400)
def test_prompts_become_the_right_texts_and_a_prompt_too_large_costs_nothing(tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path)
    prompts = [prompt_of(num_tokens, seed=num_tokens) for num_tokens in LENGTHS]
    expected = [toy_text(prompt, MAX_TOKENS) for prompt in prompts]

    async def test() -> None:
        shape = Shape(
            prefill_blocks=16, make_runner=ToyRunner.make, wrap_prefill=rdma_instead, wrap_decode=rdma_instead
        )
        async with cluster(model, shape) as running:
            requests = [request_of(prompt, MAX_TOKENS, remaining_s=120.0) for prompt in prompts]
            texts = await asyncio.gather(*map(running.text, requests))
            assert list(texts) == expected
            (pair,) = running.decode.report().pairs
            assert (pair.transport, pair.num_blocks) == ("rdma", sum(-(-num_tokens // 16) for num_tokens in LENGTHS))
            (verdict,) = await running.events(request_of(prompt_of(300), MAX_TOKENS))
            assert isinstance(verdict, Rejected)
            (after,) = running.decode.report().pairs
            assert (after.num_blocks, after.epoch) == (pair.num_blocks, pair.epoch)
            await running.until_pools_are_full()

    asyncio.run(test())
