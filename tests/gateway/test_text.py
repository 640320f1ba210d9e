"""Stop strings: whatever the chunks, the same text is shown, and none of it is past the first stop string."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from hypothesis import example, given
from hypothesis import strategies as st

from gateway.text import StopStrings, TextAssembler
from kvlease.models.tokenizer import Tokenizer

LETTERS = st.text("ab", max_size=12)
STOPS = st.lists(st.text("ab", min_size=1, max_size=5), max_size=4, unique=True)


def cut(text: str, stops: Sequence[str]) -> tuple[str, bool]:
    """By definition: the stop string that ends first, the longest of those that end there."""
    for end in range(1, len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end - max(map(len, complete))], True
    return text, False


def chunked(text: str, borders: Sequence[int]) -> list[str]:
    places = sorted({0, len(text), *(border % (len(text) + 1) for border in borders)})
    return [text[a:b] for a, b in itertools.pairwise(places)]


@given(LETTERS, STOPS, st.lists(st.integers(0, 20), max_size=6))
@example("aab", ["ab"], [2])
@example("ab", ["b", "ab"], [])
@example("aabaaab", ["aabaaaa", "aaab"], [1, 2, 3, 4, 5, 6])
def test_any_chunks_show_the_same_text(text: str, stops: list[str], borders: list[int]) -> None:
    strings = StopStrings(stops)
    shown = "".join(strings.push(chunk) for chunk in chunked(text, borders))
    matched = strings.has_matched
    shown += strings.flush()
    assert (shown, matched) == cut(text, stops)


@given(LETTERS, STOPS, st.lists(st.integers(0, 20), max_size=6))
def test_what_was_shown_is_never_taken_back(text: str, stops: list[str], borders: list[int]) -> None:
    strings = StopStrings(stops)
    final, _ = cut(text, stops)
    shown = ""
    for chunk in chunked(text, borders):
        shown += strings.push(chunk)
        assert final.startswith(shown)


def test_text_that_cannot_become_a_stop_string_is_shown_at_once() -> None:
    strings = StopStrings(["###"])
    assert strings.push("plain") == "plain"
    assert strings.push("a#") == "a"
    assert strings.push("b") == "#b"


def test_nothing_follows_a_match() -> None:
    strings = StopStrings(["x"])
    assert strings.push("axb") == "a"
    assert strings.push("c") == ""
    assert strings.flush() == ""


@given(text=st.text(max_size=20), stop=st.text(min_size=1, max_size=3))
@example(text="🌧🌧", stop="🌧")
def test_tokens_of_any_text_make_that_text_up_to_its_stop(tokenizer: Tokenizer, text: str, stop: str) -> None:
    ids = tokenizer.encode(text, False)
    assembler = TextAssembler(tokenizer.detokenizer(), [stop])
    shown = "".join(assembler.push([token_id]) for token_id in ids)
    shown += assembler.finish()
    assert (shown, assembler.is_stopped) == cut(text, [stop])


def test_tokens_behind_a_stop_string_are_not_counted(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("one;two", False)
    num_until_stop = len(tokenizer.encode("one;", False))
    assembler = TextAssembler(tokenizer.detokenizer(), [";"])
    assert assembler.push(ids) == "one"
    assert assembler.num_tokens == num_until_stop


def test_a_character_cut_short_shows_the_same_in_one_push_and_in_many(tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a🌧", False)
    for length in range(len(ids) + 1):
        whole = TextAssembler(tokenizer.detokenizer(), [])
        single = TextAssembler(tokenizer.detokenizer(), [])
        at_once = whole.push(ids[:length]) + whole.finish()
        one_by_one = "".join(single.push([token_id]) for token_id in ids[:length]) + single.finish()
        assert at_once == one_by_one


def test_a_stop_string_may_be_completed_by_the_rest_of_a_character(tokenizer: Tokenizer) -> None:
    broken = tokenizer.encode("🌧", False)[:1]
    assembler = TextAssembler(tokenizer.detokenizer(), ["\ufffd"])
    assert assembler.push([*tokenizer.encode("a", False), *broken]) + assembler.finish() == "a"
    assert assembler.is_stopped


@given(text=st.text("ab", max_size=12), stop=st.text("ab", min_size=1, max_size=3), min_tokens=st.integers(0, 12))
def test_the_first_tokens_text_may_hold_a_stop_string(
    tokenizer: Tokenizer, text: str, stop: str, min_tokens: int
) -> None:
    ids = tokenizer.encode(text, False)
    free = tokenizer.decode(ids[:min_tokens])
    rest, is_stopped = cut(text[len(free) :], [stop])
    assembler = TextAssembler(tokenizer.detokenizer(), [stop], min_tokens)
    assert assembler.push(ids) + assembler.finish() == free + rest
    assert assembler.is_stopped == is_stopped
