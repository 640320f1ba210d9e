"""Text to token ids and back.

Owns the mapping for one model folder. Decoding goes by bytes: every token stands for some bytes, and text is what
these bytes are as UTF-8, with U+FFFD for each ill-formed part (the Unicode standard's "maximal subpart" practice). A
stream and a whole decode are therefore the same by construction, and a character is never emitted by halves.

Never: imports transformers or torch.
"""

from __future__ import annotations

import codecs
import json
import re
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final, Self

import tokenizers

from kvlease.models.chat_content import RenderedChat
from kvlease.models.control_tokens import ControlTokens
from kvlease.models.errors import ModelFolderInvalid, TextInvalid

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Tokenizer:
    """The tokenizer of a model folder. Safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, spelling: Spelling) -> None:
        """Wrap a loaded backend; `load` is the usual way in."""
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._spelling = spelling
        added = backend.get_added_tokens_decoder()
        self._control_texts = {token_id: token.content for token_id, token in added.items() if token.special}
        self._special_ids = frozenset(self._control_texts)
        self._control_tokens: ControlTokens | None = None
        self._lock = threading.Lock()
        self._bytes_of: dict[int, bytes] = {}
        self._prefix = _special_prefix(backend)

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Read `tokenizer.json`; raises ModelFolderInvalid."""
        path = folder / "tokenizer.json"
        try:
            text = path.read_text(encoding="utf-8")
            spelling = Spelling.parse(json.loads(text).get("decoder"))
        except FileNotFoundError:
            raise ModelFolderInvalid(f"{path} is missing") from None
        except (OSError, ValueError, AttributeError) as error:
            raise ModelFolderInvalid(f"{path} cannot be read: {error}") from error
        try:
            backend = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the library raises the bare class
            raise ModelFolderInvalid(f"{path} is not a tokenizer: {error}") from error
        return cls(backend, spelling)

    @property
    def vocab_size(self) -> int:
        """Number of tokens with a text, added ones included; the model's own vocabulary may be padded beyond it."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def token_id(self, token: str) -> int | None:
        """The id of a token by its exact spelling; None: not in the vocabulary."""
        return self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Token ids of `text`; raises TextInvalid for lone surrogates.

        `add_special_tokens` adds what the model wants around a raw prompt (BOS for many), once: text that begins with
        it gets no second one. Text that a chat template wrote is encoded without. Releases the interpreter lock.
        """
        _check_unicode(text)
        # The batch call is the one that releases the lock; "fast" leaves out the offsets, which nobody reads.
        encoding = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]
        ids: list[int] = encoding.ids
        num_prefix = len(self._prefix)
        if add_special_tokens and num_prefix and ids[num_prefix : 2 * num_prefix] == self._prefix:
            return ids[num_prefix:]
        return ids

    @property
    def control_texts(self) -> Sequence[str]:
        """How the control tokens are written."""
        return tuple(self._control_texts.values())

    def encode_chat(self, chat: RenderedChat) -> list[int]:
        """Token ids of a rendered chat, in which only the template's own control tokens are control tokens. Raises TextInvalid."""
        if chat.controls is None:
            return self.encode(chat.text, add_special_tokens=False)
        _check_unicode(chat.text)
        with self._lock:  # made when the first such message comes: it costs as much memory as the tokenizer
            if self._control_tokens is None:
                try:
                    self._control_tokens = ControlTokens(self._backend, self._control_texts)
                except (ValueError, KeyError, TypeError, AttributeError):
                    raise TextInvalid("messages to this model must not contain the text of a control token") from None
        return self._control_tokens.encode(chat)

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`, without special tokens and ids outside the vocabulary."""
        stream = self.detokenizer()
        return stream.push(ids) + stream.flush()

    def detokenizer(self) -> Detokenizer:
        """A new stream, for one sequence."""
        return Detokenizer(self)

    def bytes_of(self, token_id: int) -> bytes:
        """What a token adds to the text, as bytes; empty for special tokens and unknown ids."""
        known = self._bytes_of.get(token_id)
        if known is None:
            known = self._bytes_of[token_id] = self._spell(token_id)
        return known

    def spelling_of(self, token_id: int) -> bytes:
        """The token itself as bytes: as `bytes_of`, but special tokens by their names; empty for unknown ids."""
        if token_id not in self._special_ids:
            return self.bytes_of(token_id)
        return (self._backend.id_to_token(token_id) or "").encode()

    @property
    def strips_space(self) -> bool:
        """Whether a space at the very beginning of a text is the tokenizer's own and not part of it."""
        return self._spelling.strips_space

    def _spell(self, token_id: int) -> bytes:
        if token_id < 0 or token_id in self._special_ids:
            return b""
        token = self._backend.id_to_token(token_id)
        return b"" if token is None else self._spelling.bytes_of(token)


class Detokenizer:
    """The text of one growing sequence. Time and memory are linear in what is pushed, and nothing of it is kept."""

    __slots__ = ("_at_own_space", "_decoder", "_tokenizer")

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Begin an empty sequence; `Tokenizer.detokenizer` is the usual way in."""
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_own_space = tokenizer.strips_space

    def push(self, ids: Iterable[int]) -> str:
        """The text that is settled now; an unfinished character is held back."""
        return self._stripped(self._decoder.decode(b"".join(map(self._tokenizer.bytes_of, ids))))

    def flush(self) -> str:
        """The end of the text: U+FFFD for a character that never came to an end, else nothing."""
        return self._stripped(self._decoder.decode(b"", final=True))

    def _stripped(self, text: str) -> str:
        if not self._at_own_space or not text:
            return text
        self._at_own_space = False
        return text.removeprefix(" ")


class Spelling:
    """How a vocabulary writes bytes: what `tokenizer.json` calls its decoder, reduced to a function of one token.

    Two ways are in use by the families that we serve: byte-level alphabets (GPT-2's, and all newer ones), and
    SentencePiece's `▁` for a space with `<0xE2>` for bytes that have no token.
    """

    __slots__ = ("_byte_level", "_byte_tokens", "_replacements", "strips_space")

    def __init__(
        self, *, byte_level: bool, byte_tokens: bool, replacements: Sequence[tuple[str, str]], strips_space: bool
    ) -> None:
        """Only `parse` and tests make one."""
        self._byte_level = byte_level
        self._byte_tokens = byte_tokens
        self._replacements = tuple(replacements)
        self.strips_space = strips_space

    @classmethod
    def parse(cls, decoder: object) -> Self:
        """Read the `decoder` member of a tokenizer.json; ValueError if it is none of the two ways."""
        byte_level = byte_tokens = strips_space = False
        replacements: list[tuple[str, str]] = []
        for step in _steps(decoder):
            match step:
                case {"type": "ByteLevel"}:
                    byte_level = True
                case {"type": "ByteFallback"}:
                    byte_tokens = True
                case {"type": "Fuse"}:
                    pass
                case {"type": "Replace", "pattern": {"String": str(old)}, "content": str(new)}:
                    replacements.append((old, new))
                case {"type": "Strip", "content": " ", "start": 1, "stop": 0}:
                    strips_space = True
                case _:
                    raise ValueError(f"unsupported decoder step {step}")
        if byte_level == bool(byte_tokens or replacements):
            raise ValueError("unsupported decoder: neither byte-level nor SentencePiece with byte tokens")
        return cls(
            byte_level=byte_level,
            byte_tokens=byte_tokens,
            replacements=replacements,
            strips_space=strips_space,
        )

    def bytes_of(self, token: str) -> bytes:
        """The bytes of one token of the vocabulary."""
        if self._byte_level:
            try:
                return bytes(_BYTE_OF_CHARACTER[character] for character in token)
            except KeyError:  # an added token, written plainly
                return token.encode("utf-8")
        if self._byte_tokens and (match := _BYTE_TOKEN.fullmatch(token)):
            return bytes((int(match[1], 16),))
        for old, new in self._replacements:
            token = token.replace(old, new)
        return token.encode("utf-8")


def _check_unicode(text: str) -> None:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise TextInvalid("the text holds a lone surrogate and is not valid Unicode") from None


def _steps(decoder: object) -> list[object]:
    if isinstance(decoder, dict) and decoder.get("type") == "Sequence":
        steps = decoder.get("decoders")
        if isinstance(steps, list):
            return steps
    return [decoder]


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 and up, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


_BYTE_OF_CHARACTER: Final = _byte_alphabet()


def _special_prefix(backend: tokenizers.Tokenizer) -> list[int]:
    """The ids that the backend writes before a raw prompt (BOS, or nothing)."""
    bare: list[int] = backend.encode("a", add_special_tokens=False).ids
    dressed: list[int] = backend.encode("a", add_special_tokens=True).ids
    for start in range(len(dressed) - len(bare) + 1):
        if dressed[start : start + len(bare)] == bare:
            return dressed[:start]
    return []
