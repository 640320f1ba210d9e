"""A rendered chat, and which of the control tokens written in it are the template's own.

A control token (`<|im_end|>` and its like) steers the model. Whoever wrote a message may have written the same characters, by
chance or to play another role, and in the rendered text the two look alike. So where it matters the messages are rendered a second
time, with an invisible mark before each character of their content at which a control token could begin: what has the mark is content.

Never: takes a word of a message for a control token.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvlease.models.errors import TextInvalid

Message = Mapping[str, object]
#: Unicode's noncharacters: in no text that is meant to be read. One that the messages do not hold serves as the mark.
_MARKS = tuple(chr(code) for code in range(0xFDD0, 0xFDF0))


@dataclass(frozen=True, slots=True)
class RenderedChat:
    """The text, and where in it (start, end, in characters) the template's own control tokens are; `None`: all that look so are."""

    text: str
    controls: tuple[tuple[int, int], ...] | None = None


def tell_apart(
    render: Callable[[Sequence[Message]], str], messages: Sequence[Message], control_texts: Sequence[str]
) -> RenderedChat:
    """Render `messages`; raises what `render` raises, and `TextInvalid` when the messages hold every possible mark."""
    plain = render(messages)
    starts = {text[0] for text in control_texts}
    words = [text for message in messages for text in _texts(message)]
    if not any(start in word for word in words for start in starts):
        return RenderedChat(plain)
    mark = _mark_for(words)
    marked = render([_marked(message, {ord(start): mark + start for start in starts}) for message in messages])
    controls = "|".join(re.escape(text) for text in sorted(control_texts, key=len, reverse=True))
    chat = _without_marks(marked, mark, list(re.finditer(f"(?<!{mark})(?:{controls})", marked)))
    return RenderedChat(plain) if _is_all_own(chat, plain, controls) else chat


def _without_marks(marked: str, mark: str, own: Sequence[re.Match[str]]) -> RenderedChat:
    pieces: list[str] = []
    spans: list[tuple[int, int]] = []
    done = num_chars = 0
    for found in own:
        pieces += (marked[done : found.start()].replace(mark, ""), found.group())
        num_chars += len(pieces[-2]) + len(pieces[-1])
        spans.append((num_chars - len(pieces[-1]), num_chars))
        done = found.end()
    return RenderedChat("".join((*pieces, marked[done:].replace(mark, ""))), tuple(spans))


def _is_all_own(chat: RenderedChat, plain: str, controls: str) -> bool:
    """Whether every control token in the plain rendering is the template's own, so that it can be read as it is."""
    found = list(re.finditer(controls, plain))
    if chat.text == plain:
        return [each.span() for each in found] == list(chat.controls or ())
    # The template looks at the content, and wrote something else for the marks: then the order of the tokens has to tell.
    return [each.group() for each in found] == [chat.text[start:end] for start, end in chat.controls or ()]


def _mark_for(words: Sequence[str]) -> str:
    for mark in _MARKS:
        if not any(mark in word for word in words):
            return mark
    raise TextInvalid("the messages hold all of Unicode's noncharacters")


def _texts(value: object) -> Iterator[str]:
    """Every text in a message."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from _texts(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _marked(message: Message, marks: Mapping[int, str]) -> Message:
    return {key: _with_marks(inner, marks) for key, inner in message.items()}


def _with_marks(value: object, marks: Mapping[int, str]) -> object:
    if isinstance(value, str):
        return value.translate(marks)
    if isinstance(value, Mapping):
        return _marked(value, marks)
    if isinstance(value, (list, tuple)):
        return [_with_marks(inner, marks) for inner in value]
    return value
