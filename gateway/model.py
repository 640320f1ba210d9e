"""The served model as the gateway sees it: names, limits, tokens. It never sees a weight.

Never: imports torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.text import Detokenizer
from gateway.text_bounds import NO_BOUND, TextBound
from kvlease.models.chat_content import RenderedChat


class Codec(Protocol):
    """Text to token ids and back; may be used by several threads at once."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """The token ids of a text."""
        ...

    @property
    def control_texts(self) -> Sequence[str]:
        """How the control tokens are written."""
        ...

    def encode_chat(self, chat: RenderedChat) -> list[int]:
        """The token ids of a rendered chat; what a message says is never a control token. Raises RequestInvalid."""
        ...

    def detokenizer(self) -> Detokenizer:
        """A fresh one for one text."""
        ...

    def spelling_of(self, token_id: int) -> bytes:
        """A token's own bytes, special ones by their names."""
        ...


class Template(Protocol):
    """Turns messages into one prompt; raises RequestInvalid."""

    def render_apart(self, messages: list[dict[str, object]], control_texts: Sequence[str]) -> RenderedChat:
        """The prompt's text, and which control tokens in it are the template's own."""
        ...


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model. `context_length` in tokens is what the model was made for, `fingerprint` in hex."""

    name: str
    vocab_size: int
    context_length: int
    end_token_ids: frozenset[int]
    fingerprint: str
    codec: Codec
    template: Template | None = None
    bound: TextBound = NO_BOUND
    created: int = 0

    def card(self, max_model_len: int) -> Mapping[str, object]:
        """The entry of /v1/models. `max_model_len` in tokens is what a request can use now."""
        return {
            "id": self.name,
            "object": "model",
            "created": self.created,
            "owned_by": "kvlease",
            "max_model_len": max_model_len,
        }

    def first_unknown(self, token_ids: Sequence[int]) -> int | None:
        """The position of the first id that the vocabulary has not, or None."""
        if min(token_ids) >= 0 and max(token_ids) < self.vocab_size:
            return None
        return next(index for index, token_id in enumerate(token_ids) if not 0 <= token_id < self.vocab_size)
