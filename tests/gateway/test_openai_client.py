"""OpenAI's own client is served: both APIs, whole and streamed, synchronous and not."""

from __future__ import annotations

import asyncio
from pathlib import Path

import openai
import pytest

from kvlease.handoff.messages import Aborted, AbortReason, Rejected, RejectReason
from kvlease.models.tokenizer import Tokenizer
from tests.gateway.serving import FakeDecode, Running, decode_facts, ends_with, on_loop, says, serving

TEXT = "the rain in spain 🌧 あ"


def telling(tokenizer: Tokenizer, text: str = TEXT) -> FakeDecode:
    return FakeDecode(decode_facts(), script=says(tokenizer.encode(text, False)))


def client_of(running: Running) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)


def async_client_of(running: Running) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)


@on_loop
async def test_a_completion_is_whole(tiny: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny, telling(tokenizer)) as running:
        answer = await asyncio.to_thread(
            lambda: client_of(running).completions.create(model="tiny", prompt="hello", max_tokens=100)
        )
    num_prompt, num_answer = len(tokenizer.encode("hello", True)), len(tokenizer.encode(TEXT, False))
    assert answer.object == "text_completion"
    assert answer.id.startswith("cmpl-")
    assert answer.choices[0].text == TEXT
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == num_prompt
    assert answer.usage.completion_tokens == num_answer + 1  # the end token is counted
    assert answer.usage.total_tokens == num_prompt + num_answer + 1


@on_loop
async def test_a_completion_is_streamed(tiny: Path, tokenizer: Tokenizer) -> None:
    def read(running: Running) -> list[openai.types.Completion]:
        stream = client_of(running).completions.create(
            model="tiny", prompt="hello", max_tokens=100, stream=True, stream_options={"include_usage": True}
        )
        return list(stream)

    async with serving(tiny, telling(tokenizer)) as running:
        chunks = await asyncio.to_thread(read, running)
    *texts, usage = chunks
    assert "".join(chunk.choices[0].text for chunk in texts) == TEXT
    assert [chunk.choices[0].finish_reason for chunk in texts][-2:] == [None, "stop"]
    assert usage.choices == []
    assert usage.usage is not None
    assert usage.usage.completion_tokens == len(tokenizer.encode(TEXT, False)) + 1
    assert all(chunk.usage is None for chunk in texts)
    assert len({chunk.id for chunk in chunks}) == 1


@on_loop
async def test_a_chat_is_whole(tiny: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny, telling(tokenizer)) as running:
        answer = await async_client_of(running).chat.completions.create(
            model="tiny", messages=[{"role": "system", "content": "be brief"}, {"role": "user", "content": "hello"}]
        )
    assert answer.object == "chat.completion"
    assert answer.id.startswith("chatcmpl-")
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == TEXT
    assert answer.choices[0].finish_reason == "stop"


@on_loop
async def test_a_chat_is_streamed(tiny: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny, telling(tokenizer)) as running:
        stream = await async_client_of(running).chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hello"}], stream=True
        )
        chunks = [chunk async for chunk in stream]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == TEXT
    assert chunks[-1].choices[0].finish_reason == "stop"
    assert all("usage" not in chunk.model_dump(exclude_unset=True) for chunk in chunks)


@on_loop
async def test_an_answer_can_be_sent_back_as_history(tiny: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny, telling(tokenizer)) as running:
        client = async_client_of(running)
        first = await client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "hello"}])
        again = await client.chat.completions.create(
            model="tiny",
            messages=[
                {"role": "user", "content": "hello"},
                first.choices[0].message.model_dump(),  # type: ignore[list-item]
                {"role": "user", "content": [{"type": "text", "text": "and now?"}]},
            ],
        )
        prompt = running.decode[0].requests[1].prompt_token_ids
    assert again.choices[0].message.content == TEXT
    assert TEXT in tokenizer.decode(prompt)
    assert "and now?" in tokenizer.decode(prompt)


@on_loop
async def test_models_are_listed_with_what_fits(tiny: Path) -> None:
    async with serving(tiny, FakeDecode(decode_facts(max_model_len=688))) as running:
        client = async_client_of(running)
        models = [model async for model in client.models.list()]
        one = await client.models.retrieve("tiny")
        with pytest.raises(openai.NotFoundError) as caught:
            await client.models.retrieve("another")
    assert [model.id for model in models] == ["tiny"]
    assert one.model_dump()["max_model_len"] == 688
    assert caught.value.code == "model_not_found"


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_verdict_arrives_unchanged(tiny: Path, stream: bool) -> None:
    verdict = Rejected(RejectReason.PROMPT_TOO_LONG, "43 blocks < 64", "context_length_exceeded", 400, "prompt")
    async with serving(tiny, FakeDecode(decode_facts(), script=ends_with(verdict))) as running:
        with pytest.raises(openai.BadRequestError) as caught:
            await async_client_of(running).completions.create(model="tiny", prompt="hello", stream=stream)
    assert caught.value.code == "context_length_exceeded"
    assert caught.value.param == "prompt"
    assert "43 blocks < 64" in caught.value.message


@on_loop
async def test_an_abort_after_the_first_token_ends_the_stream_with_an_error(tiny: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the rain", False)
    aborted = Aborted(AbortReason.SEAL_REFUSED, "digest", "seal_refused_digest", 502, retryable=True)
    texts: list[str] = []
    async with serving(tiny, FakeDecode(decode_facts(), script=ends_with(aborted, ids))) as running:
        stream = await async_client_of(running).completions.create(model="tiny", prompt="hello", stream=True)

        async def read() -> None:
            async for chunk in stream:
                texts.append(chunk.choices[0].text)  # noqa: PERF401 - what came before the error is kept

        with pytest.raises(openai.APIError) as caught:
            await read()
        assert len(running.decode[0].requests) == 1  # text was sent: never again
    assert "".join(texts) == "the rain"
    assert caught.value.code == "seal_refused_digest"
