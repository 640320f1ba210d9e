"""The bound never exceeds the number of tokens, and is sharp enough to be of use."""

from __future__ import annotations

import json
import sys
import unicodedata
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.text_bounds import NO_BOUND, TextBound, read_text_bound, text_bound_of
from kvlease.models.tokenizer import Tokenizer

TEXTS = st.one_of(st.text(max_size=40), st.text("the rain\n=", max_size=60))


@pytest.fixture(scope="module")
def description(tiny: Path) -> dict[str, Any]:
    parsed: dict[str, Any] = json.loads((tiny / "tokenizer.json").read_text())
    return parsed


@given(text=TEXTS)
@example(text="<|im_start|>" * 5)
@example(text="the" * 30)
def test_no_text_has_fewer_tokens(tiny: Path, tokenizer: Tokenizer, text: str) -> None:
    assert read_text_bound(tiny).min_tokens(text) <= len(tokenizer.encode(text, False))


@given(text=TEXTS)
@example(text="\u212a" * 20)
@example(text="\u1112\u1161\u11ab" * 20)
def test_composing_characters_is_allowed_for(description: dict[str, Any], text: str) -> None:
    composing = {**deepcopy(description), "normalizer": {"type": "NFC"}}
    backend = tokenizers.Tokenizer.from_str(json.dumps(composing))
    assert text_bound_of(composing).min_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


@given(text=TEXTS)
@example(text="<|im_end|>" + " " * 40)
def test_added_tokens_may_swallow_blanks(description: dict[str, Any], text: str) -> None:
    stripping = deepcopy(description)
    for token in stripping["added_tokens"]:
        token["lstrip"] = token["rstrip"] = True
    backend = tokenizers.Tokenizer.from_str(json.dumps(stripping))
    assert text_bound_of(stripping).min_tokens(text) <= len(backend.encode(text, add_special_tokens=False).ids)


def test_no_character_shrinks_more_than_assumed_when_composed() -> None:
    worst = 0.0
    for code in range(sys.maxunicode + 1):
        if 0xD800 <= code < 0xE000:
            continue
        character = chr(code)
        for before in (character, unicodedata.normalize("NFD", character)):
            worst = max(worst, len(before.encode()) / len(unicodedata.normalize("NFC", before).encode()))
    assert worst <= 3.0


def test_a_ruler_of_one_letter_counts_by_that_letters_longest_token() -> None:
    bound = text_bound_of(
        {
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "aaaa": 2, "ab": 3, "=" * 100: 4}},
            "pre_tokenizer": {"type": "ByteLevel"},
        }
    )
    assert bound.min_tokens("a" * 400) in (99, 100)
    assert bound.min_tokens("b" * 400) in (199, 200)
    assert bound.min_tokens("=" * 400) in (3, 4)


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "NFKC"}},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}, {"type": "Lowercase"}]}},
        {"normalizer": {"type": "Replace", "pattern": {"String": "aa"}, "content": "a"}},
        {"pre_tokenizer": {"type": "Whitespace"}},
        {"pre_tokenizer": None},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"}},
        {"model": {"type": "Unigram", "vocab": []}},
        {"model": {"type": "WordPiece", "vocab": {}}},
    ],
)
def test_what_may_drop_text_has_no_bound(description: dict[str, Any], changes: dict[str, Any]) -> None:
    assert text_bound_of({**description, **changes}) == NO_BOUND


def test_a_tokenizer_with_byte_fallback_is_bound_by_its_words() -> None:
    bound = text_bound_of(
        {
            "model": {"type": "BPE", "byte_fallback": True, "vocab": {"▁hello": 0, "▁": 1, "<0x41>": 2}},
            "normalizer": {
                "type": "Sequence",
                "normalizers": [
                    {"type": "Prepend", "prepend": "▁"},
                    {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
                ],
            },
        }
    )
    assert bound.min_tokens(" hello" * 100) in (99, 100)


def test_a_folder_without_a_description_has_no_bound(tmp_path: Path) -> None:
    assert read_text_bound(tmp_path) == NO_BOUND
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    assert read_text_bound(tmp_path) == NO_BOUND


def test_the_bound_of_nothing_is_nothing() -> None:
    assert TextBound((1.0,) * 256).min_tokens("") == 0
