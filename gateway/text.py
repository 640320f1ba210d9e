"""From token ids to the text that a client may see: stop strings never leak, whatever the chunks were.

Never: keeps more text than the longest stop string.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import Protocol

from gateway.told import ToldToken, Untold
from kvlease.sampling.tokens import TokenLogprobs


class Detokenizer(Protocol):
    """Token ids in, text out; a character that is not complete yet is held back."""

    def push(self, ids: Sequence[int]) -> str:
        """The text that has become certain."""
        ...

    def flush(self) -> str:
        """What was held back, at the end."""
        ...


class _Pattern:
    """One stop string and how much of it the text's end matches now (Knuth, Morris and Pratt 1977)."""

    __slots__ = ("_fallback", "length", "matched", "text")

    def __init__(self, text: str) -> None:
        self.text = text
        self.length = len(text)
        self.matched = 0
        self._fallback = [0] * len(text)
        length = 0
        for index in range(1, len(text)):
            while length and text[index] != text[length]:
                length = self._fallback[length - 1]
            length += text[index] == text[length]
            self._fallback[index] = length

    def step(self, character: str) -> bool:
        """True when the stop string is complete with this character."""
        while self.matched and character != self.text[self.matched]:
            self.matched = self._fallback[self.matched - 1]
        self.matched += character == self.text[self.matched]
        return self.matched == self.length


class StopStrings:
    """Cuts a text before the stop string that is complete first; of those complete together, before the longest."""

    def __init__(self, stops: Sequence[str]) -> None:
        """`stops`: none of them empty."""
        assert all(stops), "an empty stop string would stop everything"
        self._patterns = [_Pattern(text) for text in stops]
        self._held = ""
        self.has_matched = False

    def push(self, text: str) -> str:
        """The text that is certain to be before any stop string. After a match: nothing, ever."""
        if self.has_matched or not self._patterns:
            return "" if self.has_matched else text
        for index, character in enumerate(text):
            complete = [pattern.length for pattern in self._patterns if pattern.step(character)]
            if complete:
                return self._cut(self._held + text[: index + 1], max(complete))
        self._held += text
        num_held = max(pattern.matched for pattern in self._patterns)
        certain = len(self._held) - num_held
        result, self._held = self._held[:certain], self._held[certain:]
        return result

    def flush(self) -> str:
        """What was held back and turned out to be no stop string."""
        result, self._held = self._held, ""
        return result

    def _cut(self, text: str, num_matched: int) -> str:
        self.has_matched = True
        self._held = ""
        return text[: len(text) - num_matched]


class TextAssembler:
    """The text of one choice, token by token. Streams and whole answers take this one way, so they are equal."""

    def __init__(self, detokenizer: Detokenizer, stops: Sequence[str], min_tokens: int = 0) -> None:
        """Empty. The text of the first `min_tokens` tokens may hold any stop string."""
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._min_tokens = min_tokens
        self._untold = Untold()
        self._num_written = self._num_shown = 0  # characters; what is written may not be shown yet, or never
        self._is_over = False
        self.num_tokens = 0

    @property
    def is_stopped(self) -> bool:
        """Whether a stop string ended the text."""
        return self._stops.has_matched

    def push(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs] = ()) -> str:
        """New text; tokens behind a stop string are not looked at and not counted. `logprobs`: one a token, or none."""
        pieces = []
        for token_id, told in zip_longest(token_ids, logprobs):
            if self.is_stopped:
                break
            self.num_tokens += 1
            text = self._detokenizer.push((token_id,))
            offset = self._num_written
            self._num_written += len(text)
            if told is not None:
                self._untold.add(ToldToken(token_id, told, offset), self._num_written)
            pieces.append(text if self.num_tokens <= self._min_tokens else self._stops.push(text))
        return self._shown("".join(pieces))

    def finish(self) -> str:
        """The rest, when no more tokens come: an unfinished character, an unfinished stop string."""
        if self.is_stopped:
            return ""
        self._is_over = True
        tail = self._stops.push(self._detokenizer.flush())
        return self._shown(tail + self._stops.flush())  # nothing is held behind a stop string

    def told(self) -> tuple[ToldToken, ...]:
        """Tokens of the text that was returned since the last call, each once, where something was to be told of them."""
        is_all_shown = self._is_over and not self.is_stopped
        return self._untold.rest(self._num_shown) if is_all_shown else self._untold.shown(self._num_shown)

    def _shown(self, text: str) -> str:
        self._num_shown += len(text)
        return text
