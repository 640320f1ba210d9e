"""Several texts in one answer: each with its index, its own stop string and its own end."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest

from gateway.decode_claims import Expected
from kvlease.handoff.messages import (
    ChoiceFinished,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    TokensGenerated,
)
from kvlease.models.tokenizer import Tokenizer
from tests.gateway.serving import FakeDecode, Running, decode_facts, events_of, on_loop, serving

TEXTS = ("the rain", "in 🌧 spain", "stays;mainly")


def telling(tokenizer: Tokenizer, texts: Sequence[str], stranger: int | None = None) -> FakeDecode:
    """The texts token by token, all at the same time. `stranger`: tokens of a choice that nobody asked for."""

    async def script(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        ids = [tokenizer.encode(text, False) for text in texts]
        for place in range(max(map(len, ids)) + 1):
            for choice, text in enumerate(ids):
                if place < len(text):
                    yield TokensGenerated((text[place],), choice=choice)
                elif place == len(text):
                    yield ChoiceFinished(choice, FinishReason.STOP, len(text) + 1)
            if stranger is not None:
                yield TokensGenerated((7,), choice=stranger)
                yield ChoiceFinished(stranger, FinishReason.LENGTH, 1)
        yield Finished(FinishReason.STOP, len(request.prompt_token_ids), sum(map(len, ids)) + len(ids))

    return FakeDecode(decode_facts(), script=script)


def client_of(running: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)


@on_loop
@pytest.mark.parametrize("stranger", [3, 10**6])
async def test_a_choice_that_nobody_asked_for_is_an_error(tiny: Path, tokenizer: Tokenizer, stranger: int) -> None:
    async with serving(tiny, telling(tokenizer, TEXTS, stranger)) as running:
        answer = await running.complete(n=3)
    assert answer.status_code == 502
    assert f"choice {stranger}" in answer.json()["error"]["message"]


@on_loop
async def test_openais_client_reads_all_choices(tiny: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny, telling(tokenizer, TEXTS)) as running:
        answer = await client_of(running).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], n=3
        )
        assert running.decode[0].requests[0].num_choices == 3
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in answer.choices] == [
        (index, text, "stop") for index, text in enumerate(TEXTS)
    ]
    assert answer.usage is not None
    assert answer.usage.completion_tokens == sum(len(tokenizer.encode(text, False)) + 1 for text in TEXTS)


@on_loop
async def test_a_stream_opens_and_closes_every_choice(tiny: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny, telling(tokenizer, TEXTS)) as running:
        stream = await client_of(running).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], n=3, stream=True
        )
        choices = [chunk.choices[0] async for chunk in stream]
    for index, text in enumerate(TEXTS):
        mine = [choice for choice in choices if choice.index == index]
        assert mine[0].delta.role == "assistant"
        assert "".join(choice.delta.content or "" for choice in mine) == text
        assert [choice.finish_reason for choice in mine if choice.finish_reason] == ["stop"]
        assert mine[-1].finish_reason == "stop"


@on_loop
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_ends_its_own_choice_and_nothing_of_it_is_shown(
    tiny: Path, tokenizer: Tokenizer, stream: bool
) -> None:
    async with serving(tiny, telling(tokenizer, TEXTS)) as running:
        answer = await running.complete(n=3, stop=[";"], stream=stream)
    texts = dict.fromkeys(range(3), "")
    bodies: list[Any] = [json.loads(event) for event in events_of(answer)[:-1]] if stream else [answer.json()]
    choices = [choice for body in bodies for choice in body["choices"]]
    for choice in choices:
        texts[choice["index"]] += choice["text"]
    assert [*texts.values()] == ["the rain", "in 🌧 spain", "stays"]


@on_loop
async def test_when_every_choice_is_stopped_decode_is_told_to_end(tiny: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny, telling(tokenizer, ["a;" + "b" * 50, "cc;" + "d" * 50])) as running:
        answer = (await running.complete(n=2, stop=[";"])).json()
        await running.until_quiet()
        assert running.decode[0].num_cancelled == 1
    assert [choice["text"] for choice in answer["choices"]] == ["a", "cc"]
    assert answer["usage"]["completion_tokens"] == sum(len(tokenizer.encode(text, False)) for text in ("a;", "cc;"))


@on_loop
async def test_an_end_before_all_choices_have_theirs_is_an_error(tiny: Path) -> None:
    async def script(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        yield ChoiceFinished(0, FinishReason.STOP, 1)
        yield Finished(FinishReason.STOP, len(request.prompt_token_ids), 1)

    async with serving(tiny, FakeDecode(decode_facts(), script=script)) as running:
        answer = await running.complete(n=2)
    assert (answer.status_code, answer.json()["error"]["code"]) == (502, "stream_ended_early")


LENGTH, STOP = FinishReason.LENGTH, FinishReason.STOP


@pytest.mark.parametrize(
    ("event", "num_before", "is_wrong"),
    [
        (TokensGenerated((1, 2), choice=1), 2, False),
        (TokensGenerated((1, 2), choice=1), 3, True),
        (TokensGenerated((1,), choice=2), 0, True),
        (TokensGenerated((10,), choice=1), 0, True),
        (ChoiceFinished(1, LENGTH, 4), 4, False),
        (ChoiceFinished(1, LENGTH, 3), 3, True),
        (ChoiceFinished(1, STOP, 3), 2, False),
        (ChoiceFinished(1, STOP, 4), 2, True),
        (ChoiceFinished(2, STOP, 1), 0, True),
        (Finished(STOP, 3, 7), 6, False),
        (Finished(STOP, 4, 7), 6, True),
    ],
)
def test_what_a_decode_server_says_of_a_choice_must_add_up(
    event: TokensGenerated | ChoiceFinished | Finished, num_before: int, is_wrong: bool
) -> None:
    expected = Expected(vocab_size=10, num_prompt=3, max_tokens=4, num_choices=2)
    assert (expected.contradiction(event, num_before) is not None) == is_wrong
