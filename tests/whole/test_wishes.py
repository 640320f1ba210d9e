"""What a request can ask of its tokens, asked with OpenAI's client of the default model in three processes."""

from __future__ import annotations

import math
from typing import Any

import openai
import pytest

from tests.whole.serving import Served

MODEL = "smollm2-135m-instruct"
ASKED: Any = {"model": MODEL, "messages": [{"role": "user", "content": "Name a colour."}], "max_tokens": 12}


@pytest.fixture(scope="module")
def client(cluster: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0)


def test_several_texts_with_logprobs_are_the_same_again_and_streamed(client: openai.OpenAI) -> None:
    wishes: Any = {**ASKED, "n": 3, "seed": 7, "temperature": 1.2, "logprobs": True, "top_logprobs": 2}
    answer = client.chat.completions.create(**wishes)
    texts = [choice.message.content for choice in answer.choices]
    assert len({*texts}) > 1
    assert [choice.message.content for choice in client.chat.completions.create(**wishes).choices] == texts
    streamed = ["", "", ""]
    for chunk in client.chat.completions.create(**wishes, stream=True):
        for choice in chunk.choices:
            streamed[choice.index] += choice.delta.content or ""
    assert streamed == texts
    for text, choice in zip(texts, answer.choices, strict=True):
        assert choice.logprobs is not None and choice.logprobs.content is not None
        assert b"".join(bytes(entry.bytes or []) for entry in choice.logprobs.content).decode() == text
        for entry in choice.logprobs.content:
            assert 0 < math.exp(entry.logprob) <= 1
            assert entry.top_logprobs[0].logprob >= entry.logprob


def test_ends_and_a_penalty_change_the_text_as_they_say(client: openai.OpenAI) -> None:
    plain = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=8, temperature=0, logprobs=0)
    told = plain.choices[0].logprobs
    assert told is not None and told.tokens is not None
    second = told.tokens[1]
    cut = client.completions.create(model=MODEL, prompt="One, two,", max_tokens=8, temperature=0, stop=second)
    assert cut.choices[0].text == plain.choices[0].text[: plain.choices[0].text.index(second)]
    kept = client.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=8, temperature=0, stop=second, extra_body={"min_tokens": 2}
    )
    assert kept.choices[0].text.startswith(told.tokens[0] + second)
    endless = client.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=40, temperature=0, extra_body={"ignore_eos": True}
    )
    assert endless.usage is not None
    assert (endless.choices[0].finish_reason, endless.usage.completion_tokens) == ("length", 40)
    parrot = client.completions.create(
        model=MODEL, prompt="One, two,", max_tokens=8, temperature=0, extra_body={"repetition_penalty": 0.5}
    )
    assert "two" in parrot.choices[0].text, "what is rewarded is said again"


def test_a_wish_out_of_bounds_is_a_400_that_names_it(client: openai.OpenAI) -> None:
    wrong: tuple[tuple[str, Any], ...] = (
        ("n", 99),
        ("presence_penalty", 3),
        ("top_logprobs", 5),
        ("logit_bias", {"999999": 1}),
    )
    for name, value in wrong:
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(**{**ASKED, name: value})
        assert caught.value.param == name
        assert caught.value.code
