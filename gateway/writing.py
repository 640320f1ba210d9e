"""The two ways of an answer to its client: gathered and sent whole, or as events while it comes.

Never: sends anything before the first text or end, so that a failure before it has a status of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from gateway.answers import AnswerHead, AnswerShape, Part, Usage
from gateway.streaming import Reply
from gateway.told import Json, Speller, ToldToken
from kvlease.handoff.messages import FinishReason


class Writer(Protocol):
    """What takes the text of an answer."""

    async def text(self, index: int, text: str, told: Sequence[ToldToken]) -> None:
        """New text of one choice."""

    async def ended(self, index: int, reason: FinishReason) -> None:
        """One choice has all its text."""

    async def done(self, usage: Usage) -> None:
        """All have."""


@dataclass(frozen=True, slots=True)
class Form:
    """What an answer looks like. `tells_logprobs`: each choice says what its tokens were."""

    shape: AnswerShape
    head: AnswerHead
    speller: Speller
    tells_logprobs: bool
    includes_usage: bool

    def part(self, index: int, text: str, told: Sequence[ToldToken]) -> Part:
        """Text of one choice, as the API writes it."""
        return Part(text, self.shape.logprobs(told, self.speller) if self.tells_logprobs else None, index)


@dataclass(slots=True)
class _Gathered:
    pieces: list[str] = field(default_factory=list)
    told: list[ToldToken] = field(default_factory=list)
    reason: FinishReason = FinishReason.STOP


class WholeWriter:
    """The answer that is not streamed."""

    def __init__(self, reply: Reply, form: Form, num_choices: int) -> None:
        """Nothing is gathered."""
        self._reply, self._form = reply, form
        self._gathered = [_Gathered() for _ in range(num_choices)]

    async def text(self, index: int, text: str, told: Sequence[ToldToken]) -> None:
        """Keep it."""
        self._gathered[index].pieces.append(text)
        self._gathered[index].told.extend(told)

    async def ended(self, index: int, reason: FinishReason) -> None:
        """Keep the reason."""
        self._gathered[index].reason = reason

    async def done(self, usage: Usage) -> None:
        """Send everything."""
        choices = [
            (self._form.part(index, "".join(choice.pieces), choice.told), choice.reason)
            for index, choice in enumerate(self._gathered)
        ]
        await self._reply.whole(self._form.shape.whole(self._form.head, choices, usage))


class StreamWriter:
    """The events of one streamed answer."""

    def __init__(self, reply: Reply, form: Form, num_choices: int) -> None:
        """Nothing is sent before the first text or end."""
        self._reply, self._form, self._num_choices = reply, form, num_choices
        self._is_open = False

    async def text(self, index: int, text: str, told: Sequence[ToldToken]) -> None:
        """New text; tokens that make no text yet only open the stream."""
        await self._open()
        if text or told:
            await self._choice(self._form.shape.piece(self._form.part(index, text, told)))

    async def ended(self, index: int, reason: FinishReason) -> None:
        """The choice's reason."""
        await self._choice(self._form.shape.closing(index, reason))

    async def done(self, usage: Usage) -> None:
        """The usage, if asked for, and the end."""
        if self._form.includes_usage:
            await self._reply.event(self._form.shape.chunk(self._form.head, None, usage, True))
        await self._reply.done()

    async def _open(self) -> None:
        if self._is_open:
            return
        self._is_open = True
        await self._reply.open_stream()
        for index in range(self._num_choices):
            opening = self._form.shape.opening(index)
            if opening is not None:
                await self._choice(opening)

    async def _choice(self, choice: Json) -> None:
        await self._reply.event(self._form.shape.chunk(self._form.head, choice, None, self._form.includes_usage))
