"""How few tokens a text can possibly be, told from its bytes alone, so that what cannot fit is never tokenized.

Every token covers bytes of the text. A token that covers a byte b is at most `longest(b)` bytes long, the longest entry of the
vocabulary that holds b; so give each byte the weight 1 / longest(b), and no token weighs more than 1. The sum of the weights
is then a lower bound of the number of tokens. Letters live in shorter entries than blanks and rulers of '=' do, which makes
this several times sharper than one length for all.

The bound holds only where tokenizing keeps the text's bytes. A tokenizer description that may drop text, or that is not
understood here, has no bound (every weight is 0).

Never: an estimate; it must not exceed the true count for any text.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Canonical composition makes UTF-8 at most this much shorter: Hangul jamo, and the Kelvin sign, 3 bytes to 1.
_NFC_SHRINKS_BY = 3.0
_SPACE_SIGN = "▁"
_KEEPS_TEXT = frozenset({"ByteLevel", "Digits", "Metaspace", "Split"})
_ROUNDING = 1e-9


@dataclass(frozen=True, slots=True)
class TextBound:
    """A weight for each of the 256 bytes."""

    weights: tuple[float, ...]

    def min_tokens(self, text: str) -> int:
        """No encoding of `text` has fewer tokens than this. Needs milliseconds a megabyte."""
        data = text.encode()
        return int(
            sum(data.count(byte) * weight for byte, weight in enumerate(self.weights) if weight) * (1 - _ROUNDING)
        )


NO_BOUND = TextBound((0.0,) * 256)


def read_text_bound(folder: Path) -> TextBound:
    """The bound of the tokenizer in `folder` (its `tokenizer.json`); `NO_BOUND` where there is none or it is not understood."""
    path = folder / "tokenizer.json"
    if not path.is_file():
        return NO_BOUND
    try:
        return text_bound_of(json.loads(path.read_bytes()))
    except (ValueError, KeyError, TypeError, AttributeError):
        return NO_BOUND


def text_bound_of(description: Mapping[str, Any]) -> TextBound:
    """The same for a parsed `tokenizer.json`; malformed: KeyError, TypeError, AttributeError or ValueError."""
    model = description["model"]
    steps = list(_flatten(description.get("pre_tokenizer"), "pretokenizers"))
    shrinks = _normalizer_shrinks(description.get("normalizer"))
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    if model["type"] != "BPE" or shrinks is None or not all(_keeps_text(step) for step in steps):
        return NO_BOUND
    if not (is_byte_level or model.get("byte_fallback")) or model.get("continuing_subword_prefix"):
        return NO_BOUND
    entries = [_bytes_of(entry, is_byte_level) for entry in model["vocab"]]
    added = description.get("added_tokens") or []
    entries += [token["content"].encode() for token in added]
    weights = _weights(entries, shrinks)
    return TextBound(_without_blanks(weights) if any(t.get("lstrip") or t.get("rstrip") for t in added) else weights)


def _weights(entries: Iterable[bytes], shrinks: float) -> tuple[float, ...]:
    longest = [1] * 256
    for entry in entries:
        for byte in set(entry):
            longest[byte] = max(longest[byte], len(entry))
    return tuple(1.0 / (shrinks * length) for length in longest)


def _without_blanks(weights: tuple[float, ...]) -> tuple[float, ...]:
    """Some added token swallows the blanks beside it: bytes of blanks prove nothing then."""
    blanks = {byte for code in range(0x3100) if chr(code).isspace() for byte in chr(code).encode()}
    return tuple(0.0 if byte in blanks else weight for byte, weight in enumerate(weights))


def _flatten(step: Mapping[str, Any] | None, inner: str) -> Iterator[Mapping[str, Any]]:
    if step is None:
        return
    if step["type"] == "Sequence":
        for part in step[inner]:
            yield from _flatten(part, inner)
    else:
        yield step


def _normalizer_shrinks(normalizer: Mapping[str, Any] | None) -> float | None:
    """By what factor normalizing may make a text's bytes fewer; None: unknown."""
    shrinks = 1.0
    for step in _flatten(normalizer, "normalizers"):
        match step["type"]:
            case "NFC":
                shrinks = _NFC_SHRINKS_BY
            case "Prepend":
                pass
            case "Replace" if step["pattern"] == {"String": " "} and step["content"] == _SPACE_SIGN:
                pass
            case _:
                return None
    return shrinks


def _keeps_text(step: Mapping[str, Any]) -> bool:
    if step["type"] not in _KEEPS_TEXT:
        return False
    return bool(step["type"] != "Split" or step["behavior"] != "Removed")


def _bytes_of(entry: str, is_byte_level: bool) -> bytes:
    if not is_byte_level:
        return entry.replace(_SPACE_SIGN, " ").encode()
    return bytes(_BYTE_OF[character] for character in entry if character in _BYTE_OF)


def _byte_alphabet() -> dict[str, int]:
    """The byte that each character of a byte-level vocabulary stands for: printable Latin-1 is itself, the rest follow from 256 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in set(printable)]
    return {chr(byte): byte for byte in printable} | {chr(256 + index): byte for index, byte in enumerate(rest)}


_BYTE_OF = _byte_alphabet()
