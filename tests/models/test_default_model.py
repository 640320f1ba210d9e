"""The default model: fetched and converted on first use, then checked against what `transformers` makes of it."""

import time
from pathlib import Path
from typing import Any

import pytest

from kvlease.models.chat_template import ChatTemplate
from kvlease.models.facts import ModelFacts
from kvlease.models.fetch import DEFAULT_MODEL, prepare_model
from kvlease.models.tokenizer import Tokenizer

# Fetching and converting take under a minute on an idle machine of two cores; the rest is headroom for a busy one.
pytestmark = [pytest.mark.model, pytest.mark.timeout(900)]

TEXTS = (
    "What is the capital of France?",
    "  leading and trailing  ",
    "numbers 1234567890 and 3.14, 100%",
    "tabs\tand\r\nnewlines\n\n\n",
    "def f(x):\n    return {'a': x ** 2}  # comment",
    "Съешь же ещё этих мягких булок, да выпей чаю",
    "敏捷的棕色狐狸跳过懒狗",
    "いろはにほへと ちりぬるを",
    "हिन्दी में लिखना",
    "نص عربي مع تشكيلٌ",
    "한국어 문장입니다",
    "ไทย ελληνικά עברית",
    "🙂👩‍👩‍👧🏳️‍🌈 e\u0301 \u00e9 \ufb01",
    "<|im_start|>user\nhi<|im_end|>\n",
    "<|endoftext|><repo_name> <|not_special|>",
    "\x00\x01\x7f\ufeff\u2028\ufffd",
    "",
    "x" * 500,
)
MESSAGES = [
    {"role": "system", "content": "Answer briefly."},
    {"role": "user", "content": "What is the capital of France? 🙂"},
]


@pytest.fixture(scope="module")
def folder() -> Path:
    return prepare_model(DEFAULT_MODEL)


@pytest.fixture(scope="module")
def theirs(folder: Path) -> Any:
    import transformers

    return transformers.AutoTokenizer.from_pretrained(folder)


def test_its_facts(folder: Path) -> None:
    facts = ModelFacts.read(folder)
    assert (facts.name, facts.family, facts.dtype) == (DEFAULT_MODEL, "llama", "float32")
    assert (facts.num_layers, facts.num_kv_heads, facts.head_dim) == (30, 3, 64)
    assert (facts.context_length, facts.vocab_size, facts.end_token_ids) == (8192, 49152, frozenset({2}))


def test_a_prepared_folder_and_its_fingerprint_are_had_at_once(folder: Path) -> None:
    begin = time.monotonic()
    prepare_model(DEFAULT_MODEL)
    ModelFacts.read(folder)
    assert time.monotonic() - begin < 2.0


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_and_text_are_those_of_transformers(folder: Path, theirs: Any, text: str) -> None:
    ours = Tokenizer.load(folder)
    for special in (False, True):
        ids = ours.encode(text, special)
        assert ids == theirs(text, add_special_tokens=special).input_ids
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
    assert ours.vocab_size == len(theirs)


def test_every_token_has_the_text_that_transformers_gives_it(folder: Path, theirs: Any) -> None:
    ours = Tokenizer.load(folder)
    assert theirs.batch_decode([[each] for each in range(ours.vocab_size)], skip_special_tokens=True) == [
        ours.decode([each]) for each in range(ours.vocab_size)
    ]


def test_no_token_is_put_before_a_raw_prompt(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    assert tokenizer.encode("Hello", True) == tokenizer.encode("Hello", False)
    assert (tokenizer.token_id("<|im_start|>"), tokenizer.token_id("<|im_end|>")) == (1, 2)


def test_chats_are_rendered_as_transformers_does(folder: Path, theirs: Any) -> None:
    template = ChatTemplate.load(folder)
    assert template is not None
    for messages in (MESSAGES, MESSAGES[1:]):
        expected = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert template.render(messages) == expected
        ids = theirs.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert Tokenizer.load(folder).encode(expected, add_special_tokens=False) == ids


def test_the_converted_weights_know_the_capital_of_france(folder: Path) -> None:
    import torch
    import transformers

    torch.set_num_threads(1)
    load: Any = transformers.AutoModelForCausalLM.from_pretrained
    tokenizer, template = Tokenizer.load(folder), ChatTemplate.load(folder)
    assert template is not None
    question = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.encode(template.render(question), add_special_tokens=False)
    answer = load(folder).generate(torch.tensor([prompt]), max_new_tokens=12, do_sample=False)[0, len(prompt) :]
    assert "Paris" in tokenizer.decode(answer.tolist())
