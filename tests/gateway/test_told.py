"""What is told of tokens: each once, in order, never before its text is shown, and never if a stop string takes it back."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.text import TextAssembler
from gateway.told import ToldToken, chat_logprobs, completion_logprobs
from kvlease.handoff.messages import Finished, FinishReason, GenerationEvent, GenerationRequest, TokensGenerated
from kvlease.models.tokenizer import Tokenizer
from kvlease.sampling.tokens import TokenLogprobs
from tests.gateway.serving import FakeDecode, Running, decode_facts, events_of, on_loop, serving

TEXT = "the rain 🌧 in spain"


def told_of(place: int) -> TokenLogprobs:
    """A number for each place of an answer, so that they cannot be confused."""
    return TokenLogprobs(-0.5 * place, ((place, -0.25),))


def telling(token_ids: Sequence[int], at_once: int) -> FakeDecode:
    async def script(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        for start in range(0, len(token_ids), at_once):
            part = tuple(token_ids[start : start + at_once])
            yield TokensGenerated(part, tuple(told_of(start + place) for place in range(len(part))))
        yield Finished(FinishReason.STOP, len(request.prompt_token_ids), len(token_ids) + 1)

    return FakeDecode(decode_facts(), script=script)


@given(
    text=st.text(st.sampled_from("ab🌧"), max_size=10),
    stops=st.lists(st.text(st.sampled_from("ab🌧"), min_size=1, max_size=4), max_size=2),
    borders=st.lists(st.integers(1, 3), max_size=8),
)
@example(text="aab", stops=["ab"], borders=[1, 1, 1])
@example(text="a🌧b", stops=["🌧"], borders=[])
def test_exactly_the_tokens_of_the_text_that_is_shown_are_told_of(
    tokenizer: Tokenizer, text: str, stops: list[str], borders: list[int]
) -> None:
    ids = tokenizer.encode(text, False)
    assembler = TextAssembler(tokenizer.detokenizer(), stops)
    told: list[ToldToken] = []
    shown, first = "", 0
    for size in [*borders, len(ids)]:
        part = range(first, min(first + size, len(ids)))
        shown += assembler.push([ids[place] for place in part], [told_of(place) for place in part])
        told += assembler.told()
        first = part.stop
        assert shown.encode().startswith(spelled(tokenizer, told)), "told before it was shown"
    shown += assembler.finish()
    told += assembler.told()
    assert [token.logprobs for token in told] == [told_of(place) for place in range(len(told))]
    assert [token.token_id for token in told] == ids[: len(told)]
    if not assembler.is_stopped:
        assert len(told) == len(ids)
    elif len(told) < len(ids):
        beyond = spelled(tokenizer, told) + tokenizer.bytes_of(ids[len(told)])
        assert len(beyond) > len(shown.encode()), "a token of the shown text was not told of"
    assert assembler.told() == ()


def spelled(tokenizer: Tokenizer, told: Sequence[ToldToken]) -> bytes:
    return b"".join(tokenizer.bytes_of(token.token_id) for token in told)


def test_a_character_cut_short_at_the_end_is_told_of_at_the_end(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("🌧", False)[:2]
    assembler = TextAssembler(tokenizer.detokenizer(), [])
    assembler.push(ids, [told_of(0), told_of(1)])
    assert assembler.told() == ()
    assembler.finish()
    assert [token.token_id for token in assembler.told()] == ids


def test_special_tokens_have_their_names_and_parts_of_characters_their_bytes(tokenizer: Tokenizer) -> None:
    end = tokenizer.token_id("<|im_end|>")
    assert end is not None
    part = tokenizer.encode("🌧", False)[0]
    token = ToldToken(part, TokenLogprobs(-1.0, ((end, -0.5),)), 3)
    told: Any = chat_logprobs([token], tokenizer)
    assert told["content"][0]["token"].startswith("bytes:\\xf0")
    assert bytes(told["content"][0]["bytes"]) == tokenizer.bytes_of(part)
    assert told["content"][0]["top_logprobs"][0]["token"] == "<|im_end|>"
    told = completion_logprobs([token], tokenizer)
    assert told["text_offset"] == [3]
    assert list(told["top_logprobs"][0].values()) == [-0.5, -1.0]


@on_loop
async def test_openais_client_reads_a_chats_logprobs(tiny: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, False)

    async def ask(running: Running) -> openai.types.chat.ChatCompletion:
        client = openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="any", max_retries=0)
        return await client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=1
        )

    async with serving(tiny, telling(ids, 3)) as running:
        answer = await ask(running)
        assert running.decode[0].requests[0].sampling.top_logprobs == 1
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None and logprobs.content is not None
    assert b"".join(bytes(entry.bytes or []) for entry in logprobs.content).decode() == TEXT
    assert [entry.logprob for entry in logprobs.content] == [told_of(place).logprob for place in range(len(ids))]
    assert all([top.logprob for top in entry.top_logprobs] == [-0.25] for entry in logprobs.content)


@on_loop
async def test_a_completion_tells_whole_and_streamed_the_same(tiny: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode(TEXT, False)
    async with serving(tiny, telling(ids, 2)) as running:
        whole = (await running.complete(logprobs=1, max_tokens=64)).json()["choices"][0]
        stream = await running.complete(logprobs=1, max_tokens=64, stream=True)
    assert whole["text"] == TEXT
    told = whole["logprobs"]
    assert [len(told[name]) for name in ("tokens", "token_logprobs", "top_logprobs", "text_offset")] == [len(ids)] * 4
    for token, offset in zip(told["tokens"], told["text_offset"], strict=True):
        assert token.startswith("bytes:") or TEXT[offset:].startswith(token)
    *events, _ = events_of(stream)
    parts = [json.loads(event)["choices"][0]["logprobs"] for event in events]
    for name, values in told.items():
        assert [value for part in parts if part is not None for value in part[name]] == values


@on_loop
@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_string_leaks_by_no_way(tiny: Path, tokenizer: Tokenizer, stream: bool) -> None:
    ids = tokenizer.encode("one SECRET two", False)
    async with serving(tiny, telling(ids, 1)) as running:
        answer = await running.chat(stop=["SECRET"], logprobs=True, stream=stream)
    choices = (
        [json.loads(event)["choices"][0] for event in events_of(answer)[:-1]] if stream else answer.json()["choices"]
    )
    told = [choice["logprobs"]["content"] for choice in choices if choice["logprobs"]]
    assert "".join(entry["token"] for part in told for entry in part) == "one "
    assert (
        "".join((choice.get("delta") or choice.get("message") or {}).get("content", "") for choice in choices) == "one "
    )


@on_loop
async def test_who_did_not_ask_is_told_nothing(tiny: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny, telling(tokenizer.encode(TEXT, False), 2)) as running:
        answer = await running.chat()
        assert running.decode[0].requests[0].sampling.top_logprobs is None
    assert answer.json()["choices"][0]["logprobs"] is None
