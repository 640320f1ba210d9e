"""What a client is told of single tokens, in OpenAI's two shapes; and when: not before their whole text is shown.

Never: tells of a token whose text a stop string may still take back, or has taken back.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from kvlease.sampling.tokens import TokenLogprobs

Json = Mapping[str, object]


class Speller(Protocol):
    """Says what a token is, special ones included."""

    def spelling_of(self, token_id: int) -> bytes:
        """The token's own bytes; not always whole characters."""
        ...


@dataclass(frozen=True, slots=True)
class ToldToken:
    """One token of an answer. `offset`: where its text begins, in characters of the answer's text."""

    token_id: int
    logprobs: TokenLogprobs
    offset: int


class Untold:
    """Tokens that wait until their text is shown."""

    def __init__(self) -> None:
        """None waits."""
        self._settled: deque[tuple[int, ToldToken]] = deque()  # with the text's length behind each
        self._unsettled: list[ToldToken] = []  # their character is not complete

    def add(self, token: ToldToken, end: int) -> None:
        """`end`: the length of the text with this token; one that adds none ends where the next one does that adds some."""
        self._unsettled.append(token)
        if end > token.offset:
            self._settled.extend((end, waiting) for waiting in self._unsettled)
            self._unsettled.clear()

    def shown(self, num_chars: int) -> tuple[ToldToken, ...]:
        """So much of the text is shown: the tokens of which may be told now."""
        told = []
        while self._settled and self._settled[0][0] <= num_chars:
            told.append(self._settled.popleft()[1])
        return tuple(told)

    def rest(self, num_chars: int) -> tuple[ToldToken, ...]:
        """Nothing follows, and all of the text is shown: everything that waits."""
        told = (*self.shown(num_chars), *self._unsettled)
        self._unsettled.clear()
        return told


def chat_logprobs(tokens: Sequence[ToldToken], speller: Speller) -> Json:
    """The `logprobs` of a chat's choice."""
    content = [
        _chat_entry(token.token_id, token.logprobs.logprob, speller)
        | {"top_logprobs": [_chat_entry(token_id, logprob, speller) for token_id, logprob in token.logprobs.top]}
        for token in tokens
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ToldToken], speller: Speller) -> Json:
    """The `logprobs` of a completion's choice. The drawn token is among its alternatives, as OpenAI has it."""
    return {
        "tokens": [_label(speller.spelling_of(token.token_id)) for token in tokens],
        "token_logprobs": [token.logprobs.logprob for token in tokens],
        "top_logprobs": [_alternatives(token, speller) for token in tokens],
        "text_offset": [token.offset for token in tokens],
    }


def _alternatives(token: ToldToken, speller: Speller) -> dict[str, float]:
    every = (*token.logprobs.top, (token.token_id, token.logprobs.logprob))
    found: dict[str, float] = {}
    for token_id, logprob in every:
        found.setdefault(_label(speller.spelling_of(token_id)), logprob)
    return found


def _chat_entry(token_id: int, logprob: float, speller: Speller) -> dict[str, object]:
    data = speller.spelling_of(token_id)
    return {"token": _label(data), "logprob": logprob, "bytes": list(data)}


def _label(data: bytes) -> str:
    """Part of a character is written as its bytes, as OpenAI does."""
    try:
        return data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)
