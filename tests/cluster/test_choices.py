"""Several texts of one prompt: computed once, sent once, held once; and each text is what it would be alone."""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    ChoiceFinished,
    Finished,
    FinishReason,
    GenerationEvent,
    Rejected,
    RejectReason,
    TokensGenerated,
)
from kvlease.kvcache.sizing import choice_blocks
from kvlease.sampling.params import SamplingParams
from kvlease.v1 import kvlease_pb2 as pb
from tests.cluster.harness import Oracle, Shape, cluster, prompt_of, request_of
from tests.cluster.lying import lying
from tests.waiting import until

HOT = SamplingParams(temperature=1.5, seed=21, repetition_penalty=1.1)


def texts_of(events: Sequence[GenerationEvent]) -> dict[int, tuple[int, ...]]:
    texts: dict[int, tuple[int, ...]] = defaultdict(tuple)
    for event in events:
        if isinstance(event, TokensGenerated):
            texts[event.choice] += event.token_ids
    return texts


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 40, 64])
def test_each_choice_is_the_text_that_it_would_be_alone_and_the_prompt_is_sent_once(
    model: Path, num_tokens: int
) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            prompt = prompt_of(num_tokens, num_tokens)
            *events, end = await running.events(request_of(prompt, 12, sampling=HOT, num_choices=4))
            assert running.decode.peers.pairs[0].report().num_blocks == -(-num_tokens // 16)
            texts = texts_of(events)
            assert len({*texts.values()}) == 4
            for choice in range(4):
                alone = request_of(prompt, 12, sampling=HOT.for_choice(choice))
                assert texts[choice] == await running.text(alone)
            finished = [event for event in events if isinstance(event, ChoiceFinished)]
            assert sorted(event.choice for event in finished) == [0, 1, 2, 3]
            assert {(event.reason, event.num_generated_tokens) for event in finished} == {(FinishReason.LENGTH, 12)}
            assert end == Finished(FinishReason.LENGTH, num_tokens, 48)
            await running.until_pools_are_full()

    asyncio.run(test())


def test_greedy_choices_are_one_text_in_a_small_block_and_a_large_one(model: Path, oracle: Oracle) -> None:
    async def test() -> None:
        for size in (8, 32):
            async with cluster(model, Shape(decode_block_size=size, prefill_block_size=16, chunk_tokens=32)) as running:
                events = await running.events(request_of(prompt_of(70), 9, num_choices=3))
                assert {*texts_of(events).values()} == {oracle.text(prompt_of(70), 9)}
                await running.until_pools_are_full()

    asyncio.run(test())


def test_the_prompts_whole_blocks_are_held_once(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            request = request_of(prompt_of(600), 60, num_choices=8)
            task = asyncio.create_task(running.events(request))
            await until(lambda: len(running.decode.batch) == 8, what="all choices run")
            counts = running.decode.memory.kv.counts()
            assert counts.total - counts.free == sum(choice_blocks(600, 60, 8, 16)) == 42 + 7 * 5
            await task
            await running.until_pools_are_full()

    asyncio.run(test())


def test_choices_end_each_at_its_own_time_and_by_its_own_reason(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            prompt = prompt_of(40)
            texts = texts_of(await running.events(request_of(prompt, 10, sampling=HOT, num_choices=3)))
            at_once, later = texts[1][0], texts[2][5]
            ends = frozenset({at_once, later})
            *events, end = await running.events(request_of(prompt, 10, sampling=HOT, num_choices=3, end_token_ids=ends))
            assert isinstance(end, Finished)
            found = {event.choice: event for event in events if isinstance(event, ChoiceFinished)}
            assert found[1] == ChoiceFinished(1, FinishReason.STOP, 1)
            for choice, text in texts.items():
                length = next((place for place, token in enumerate(text) if token in ends), 10)
                assert texts_of(events)[choice] == text[:length]
            assert end.num_generated_tokens == sum(event.num_generated_tokens for event in found.values())
            await running.until_pools_are_full()

    asyncio.run(test())


def test_choices_of_one_token_are_complete_without_a_transfer(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            sampling = replace(HOT, top_logprobs=1)
            *events, end = await running.events(request_of(prompt_of(40), 1, sampling=sampling, num_choices=3))
            assert sorted(texts_of(events)) == [0, 1, 2]
            assert all(event.logprobs for event in events if isinstance(event, TokensGenerated))
            assert sum(isinstance(event, ChoiceFinished) for event in events) == 3
            assert end == Finished(FinishReason.LENGTH, 40, 3)
            assert running.decode.peers.pairs[0].report().num_blocks == 0

    asyncio.run(test())


def test_choices_that_can_never_fit_are_refused_at_the_door(model: Path) -> None:
    async def test() -> None:
        async with cluster(model, Shape(decode_blocks=20)) as running:
            (end,) = await running.events(request_of(prompt_of(100), 100, num_choices=3))
            assert isinstance(end, Rejected)
            assert (end.reason, end.http_status, end.param) == (RejectReason.OUTPUT_TOO_LONG, 400, "n")
            fits = await asyncio.gather(
                *(running.events(request_of(prompt_of(100, n), 60, num_choices=2)) for n in range(6))
            )
            assert all(isinstance(events[-1], Finished) for events in fits), "they wait for each other's room"
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_client_that_leaves_frees_all_choices(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            task = asyncio.create_task(running.events(request_of(prompt_of(300), 200, num_choices=4)))
            await until(lambda: len(running.decode.batch) == 4, what="all choices run")
            task.cancel()
            await running.until_pools_are_full()
            assert len(running.decode.batch) == 0

    asyncio.run(test())


def test_a_manifest_with_too_few_first_tokens_is_refused(model: Path) -> None:
    def forget(message: pb.AttemptDown) -> pb.AttemptDown:
        if message.WhichOneof("message") == "commit":
            del message.commit.further[-1]
        return message

    async def test() -> None:
        async with cluster(model, Shape(in_front=lying(forget))) as running:
            (end,) = await running.events(request_of(prompt_of(40), 8, num_choices=3))
            assert isinstance(end, Aborted)
            assert end.reason is AbortReason.MANIFEST_MISMATCH
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_first_token_that_the_model_has_not_ends_its_request_alone(model: Path, oracle: Oracle) -> None:
    spoiled = iter([True, True])  # both attempts of the first request

    def spoil(message: pb.AttemptDown) -> pb.AttemptDown:
        if message.WhichOneof("message") == "commit" and next(spoiled, False):
            message.commit.first_token_id = 10**6
        return message

    async def test() -> None:
        async with cluster(model, Shape(in_front=lying(spoil))) as running:
            (end,) = await running.events(request_of(prompt_of(40), 8))
            assert isinstance(end, Aborted)
            assert end.reason is AbortReason.MANIFEST_MISMATCH
            assert await running.text(request_of(prompt_of(40), 8)) == oracle.text(prompt_of(40), 8)
            await running.until_pools_are_full()

    asyncio.run(test())
