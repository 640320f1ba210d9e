"""A second copy of a tokenizer whose control tokens have names that nobody can write.

Text that looks like a control token is only text to it, in every way a tokenizer has to find one: as an added token, as a word of the
vocabulary, or as a merge. The control tokens keep their ids and their habits (what white space beside them becomes); only their names differ,
and these are drawn at random for each process.

Never: used for text in which a client may write control tokens.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import tokenizers

from kvlease.models.chat_content import RenderedChat
from kvlease.models.errors import TextInvalid


class ControlTokens:
    """The second copy. `contents` are the control tokens by id."""

    def __init__(self, backend: tokenizers.Tokenizer, contents: Mapping[int, str]) -> None:
        """Raises ValueError for a tokenizer that cannot be copied so."""
        nonce = secrets.token_hex(8)
        self._names = {content: f"\ufdd0{nonce}.{token_id}\ufdd1" for token_id, content in contents.items()}
        self._ids = {content: token_id for token_id, content in contents.items()}
        description = _renamed(json.loads(backend.to_str()), self._names)
        try:
            self._backend = tokenizers.Tokenizer.from_str(json.dumps(description))
        except Exception as error:  # the library raises the bare class
            raise ValueError(f"the tokenizer's control tokens cannot be renamed: {error}") from error
        self._backend.no_truncation()
        self._backend.no_padding()
        if any(self._backend.token_to_id(name) != self._ids[content] for content, name in self._names.items()):
            raise ValueError("the tokenizer's control tokens change their ids when they are renamed")
        self._unknown = description["model"].get("unk_token")

    def encode(self, chat: RenderedChat) -> list[int]:
        """Token ids, with exactly the control tokens that `chat` names; raises `TextInvalid` rather than one more or less."""
        assert chat.controls is not None, "a chat without content that looks like a control token needs no copy"
        text, done = "", 0
        wanted = []
        for start, end in chat.controls:
            content = chat.text[start:end]
            text += chat.text[done:start] + self._names[content]
            wanted.append(self._ids[content])
            done = end
        ids: list[int] = self._backend.encode_batch_fast([text + chat.text[done:]], add_special_tokens=False)[0].ids
        if self._among(ids) != wanted:
            raise TextInvalid("the messages hold text that this model's tokenizer cannot tell from its control tokens")
        return ids

    def _among(self, ids: Sequence[int]) -> list[int]:
        """The control tokens; the unknown token is none here, since characters that the vocabulary lacks become it."""
        unknown = None if self._unknown is None else self._backend.token_to_id(self._unknown)
        known = frozenset(self._ids.values()) - {unknown}
        return [token_id for token_id in ids if token_id in known]


def _renamed(description: dict[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    model = description["model"]
    vocabulary = model["vocab"]
    if isinstance(vocabulary, dict):
        model["vocab"] = {names.get(token, token): token_id for token, token_id in vocabulary.items()}
    else:  # pieces with their scores, in the order of their ids
        model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
    if model.get("unk_token") is not None:
        model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    for token in description["added_tokens"]:
        token["content"] = names.get(token["content"], token["content"])
    # It names control tokens, and only adds what a template writes itself.
    return description | {"post_processor": None, "decoder": None}
