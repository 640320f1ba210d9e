"""The toy engine through both servers: its text is what it should be, and a block of another prompt changes it."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from kvlease.engine.batch import Draw, SequenceStep
from kvlease.sampling.params import SamplingParams
from tests.cluster.harness import Shape, cluster, prompt_of, request_of
from tests.cluster.toy import ToyRunner, toy_text


def test_both_servers_write_the_toy_text(model: Path) -> None:
    async def test() -> None:
        async with cluster(model, Shape(make_runner=ToyRunner.make, chunk_tokens=32)) as running:
            prompts = [prompt_of(num_tokens, num_tokens) for num_tokens in (1, 16, 17, 100)]
            texts = await asyncio.gather(*(running.text(request_of(prompt, 6)) for prompt in prompts))
            assert list(texts) == [toy_text(prompt, 6) for prompt in prompts]
            await running.until_pools_are_full()

    asyncio.run(test())


@pytest.mark.parametrize("change", [0, 20, 39])
def test_a_slot_that_holds_something_else_changes_the_text_or_is_noticed(model: Path, change: int) -> None:
    prompt = prompt_of(40)
    runner, table = ToyRunner.make(model, 8), (3, 1, 5)
    runner.ledger.clear(table)
    runner.run([SequenceStep(runner.ledger.readable(1, table, 0), prompt)])
    runner.storage.array(0, "k")[table[change // 16], change % 16] += 1
    with pytest.raises(AssertionError, match="disagree"):
        runner.run([SequenceStep(runner.ledger.readable(1, table, 40), (11,), (Draw(SamplingParams()),))])
    for layer, arrays in enumerate(runner.layout.layers):
        for spec in arrays:
            if (layer, spec.name) != (0, "k"):
                runner.storage.array(layer, spec.name)[table[change // 16], change % 16] += 1
    ((drawn,),) = runner.run([SequenceStep(runner.ledger.readable(1, table, 40), (11,), (Draw(SamplingParams()),))])
    assert (drawn.token_id,) != toy_text((*prompt, 11), 1)
