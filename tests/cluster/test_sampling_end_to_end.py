"""What a request asks of its tokens is done on both sides alike: the text is that of one process, whoever drew which token."""

from __future__ import annotations

import asyncio
from pathlib import Path

from kvlease.handoff.messages import Finished, FinishReason, TokensGenerated
from kvlease.sampling.params import SamplingParams
from tests.cluster.harness import Oracle, cluster, prompt_of, request_of

PROMPT = prompt_of(40, 3)
FREE = SamplingParams(temperature=1.0, top_p=0.9, seed=11)


def test_no_end_token_is_drawn_before_min_tokens_on_either_side(model: Path, oracle: Oracle) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            free = oracle.text(PROMPT, 8)
            ends = frozenset(free)
            stopped = await running.events(request_of(PROMPT, 8, end_token_ids=ends))
            assert stopped == [Finished(FinishReason.STOP, 40, 1)]
            for min_tokens in (1, 3, 8):
                request = request_of(PROMPT, 8, end_token_ids=ends, sampling=SamplingParams(min_tokens=min_tokens))
                *told, end = await running.events(request)
                tokens = [token for event in told if isinstance(event, TokensGenerated) for token in event.token_ids]
                assert not ends & set(tokens[:min_tokens])
                assert len(tokens) >= min_tokens
                assert isinstance(end, Finished)
            await running.until_pools_are_full()

    asyncio.run(test())


def test_the_text_goes_on_the_same_when_prefill_draws_what_decode_drew(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            whole = await running.text(request_of(PROMPT, 8, sampling=FREE))
            assert len(set(whole)) > 1
            for split in (1, 4):
                rest = await running.text(request_of(PROMPT + whole[:split], 8 - split, sampling=FREE))
                assert whole[:split] + rest == whole

    asyncio.run(test())
