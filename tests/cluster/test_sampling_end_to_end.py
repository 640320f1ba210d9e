"""What a request asks of its tokens is done on both sides alike: the text is that of one process, whoever drew which token."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from kvlease.handoff.messages import Finished, FinishReason, Rejected, TokensGenerated
from kvlease.sampling.params import SamplingParams
from tests.cluster.harness import Oracle, cluster, prompt_of, request_of
from tests.engine.texts import reference
from tests.plain_sampling import plain_gap, plain_logits

PROMPT = prompt_of(40, 3)
FREE = SamplingParams(temperature=1.0, top_p=0.9, seed=11)
SHAPED = SamplingParams(
    temperature=1.3,
    top_p=0.95,
    top_k=50,
    min_p=0.02,
    seed=5,
    repetition_penalty=1.2,
    logit_bias=((20, 2.0), (31, -100.0)),
)
PENALTIES = (
    SamplingParams(repetition_penalty=1.7),
    SamplingParams(presence_penalty=1.5, frequency_penalty=0.7),
    SamplingParams(presence_penalty=-1.5),
    SamplingParams(logit_bias=((40, 3.0), (41, -3.0)), repetition_penalty=0.8, frequency_penalty=1.0),
)
CLOSE = 1e-3  # of float32 logits of size ten: a thousand times what rounding makes of them


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


@pytest.mark.parametrize("sampling", [FREE, SHAPED])
def test_the_text_goes_on_the_same_when_prefill_draws_what_decode_drew(model: Path, sampling: SamplingParams) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            whole = await running.text(request_of(PROMPT, 8, sampling=sampling))
            assert len(set(whole)) > 1
            for split in (1, 4):
                rest = await running.text(request_of(PROMPT + whole[:split], 8 - split, sampling=sampling))
                assert whole[:split] + rest == whole

    asyncio.run(test())


def test_penalised_text_is_what_transformers_and_the_definitions_give(model: Path, oracle: Oracle) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            requests = [request_of(PROMPT, 12, sampling=sampling) for sampling in PENALTIES]
            texts = await asyncio.gather(*(running.text(request) for request in requests))
            assert all(text != oracle.text(PROMPT, 12) for text in texts), "every penalty changes this text"
            for text, sampling in zip(texts, PENALTIES, strict=True):
                logits = reference(model).logits(PROMPT + text).tolist()
                for place, token_id in enumerate(text):
                    row = plain_logits(logits[len(PROMPT) + place - 1], PROMPT, text[:place], sampling)
                    assert plain_gap(row, token_id) < CLOSE, (sampling, place)
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_bias_on_a_token_that_the_model_has_not_is_refused_at_decodes_door(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            beyond = running.decode_runner.facts.vocab_size
            (end,) = await running.events(request_of(PROMPT, 8, sampling=SamplingParams(logit_bias=((beyond, 1.0),))))
            assert isinstance(end, Rejected)
            assert (end.http_status, end.param) == (400, "logit_bias")

    asyncio.run(test())


@pytest.mark.parametrize("max_tokens", [1, 10])
def test_logprobs_are_those_of_transformers_whoever_drew_the_token(model: Path, max_tokens: int) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            requests = [
                request_of(PROMPT, max_tokens, sampling=replace(sampling, top_logprobs=4))
                for sampling in (SamplingParams(), SHAPED, PENALTIES[0])
            ]
            answers = await asyncio.gather(*(running.events(request) for request in requests))
            for *events, end in answers:
                assert isinstance(end, Finished)
                drawn = [
                    pair
                    for event in events
                    if isinstance(event, TokensGenerated)
                    for pair in zip(event.token_ids, event.logprobs, strict=True)
                ]
                assert len(drawn) == max_tokens
                text = tuple(token_id for token_id, _ in drawn)
                wanted = reference(model).logits(PROMPT + text).log_softmax(-1)[len(PROMPT) - 1 : -1]
                for row, (token_id, told) in zip(wanted.tolist(), drawn, strict=True):
                    assert told.logprob == pytest.approx(row[token_id], abs=CLOSE)
                    best = sorted(row, reverse=True)[:4]
                    assert [logprob for _, logprob in told.top] == pytest.approx(best, abs=CLOSE)
                    assert [row[other] for other, _ in told.top] == pytest.approx(best, abs=CLOSE)

    asyncio.run(test())


def test_who_does_not_ask_is_sent_no_logprobs(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            for max_tokens in (1, 4):
                events = await running.events(request_of(PROMPT, max_tokens))
                assert all(not event.logprobs for event in events if isinstance(event, TokensGenerated))

    asyncio.run(test())
