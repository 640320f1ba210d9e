"""The JSON objects of OpenAI's two answers, whole and in chunks.

Never: decides anything; it writes down what was generated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from gateway.told import Json, Speller, ToldToken, chat_logprobs, completion_logprobs
from kvlease.handoff.messages import FinishReason


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts. An end token that was drawn is counted."""

    num_prompt_tokens: int
    num_generated_tokens: int

    def body(self) -> Json:
        """OpenAI's usage object."""
        return {
            "prompt_tokens": self.num_prompt_tokens,
            "completion_tokens": self.num_generated_tokens,
            "total_tokens": self.num_prompt_tokens + self.num_generated_tokens,
        }


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every object of one answer repeats."""

    request_id: str
    created: int
    model: str
    fingerprint: str

    def body(self, prefix: str, kind: str) -> dict[str, object]:
        """The fields around the choices."""
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": f"fp_{self.fingerprint}",
        }


@dataclass(frozen=True, slots=True)
class Part:
    """New text of one choice; `logprobs` in the API's own shape, where they were asked for."""

    text: str
    logprobs: Json | None = None
    index: int = 0


class AnswerShape(Protocol):
    """One API's way to write an answer."""

    def logprobs(self, told: Sequence[ToldToken], speller: Speller) -> Json:
        """What is told of tokens."""
        ...

    def whole(self, head: AnswerHead, choices: Sequence[tuple[Part, FinishReason]], usage: Usage) -> Json:
        """The answer that is not streamed."""
        ...

    def opening(self, index: int) -> Json | None:
        """The choice that opens a stream, if there is one."""
        ...

    def piece(self, part: Part) -> Json:
        """A choice with new text."""
        ...

    def closing(self, index: int, reason: FinishReason) -> Json:
        """The choice that ends the text."""
        ...

    def chunk(self, head: AnswerHead, choice: Json | None, usage: Usage | None, includes_usage: bool) -> Json:
        """One event of a stream; with `includes_usage` every event has the field, and the last one its value."""
        ...


class CompletionShape:
    """/v1/completions."""

    def logprobs(self, told: Sequence[ToldToken], speller: Speller) -> Json:
        """What is told of tokens."""
        return completion_logprobs(told, speller)

    def whole(self, head: AnswerHead, choices: Sequence[tuple[Part, FinishReason]], usage: Usage) -> Json:
        """The answer that is not streamed."""
        written = [self._choice(part, reason) for part, reason in choices]
        return head.body("cmpl", "text_completion") | {"choices": written, "usage": usage.body()}

    def opening(self, index: int) -> Json | None:
        """Nothing opens it."""
        return None

    def piece(self, part: Part) -> Json:
        """New text."""
        return self._choice(part, None)

    def closing(self, index: int, reason: FinishReason) -> Json:
        """No text, and why it ended."""
        return self._choice(Part("", None, index), reason)

    def chunk(self, head: AnswerHead, choice: Json | None, usage: Usage | None, includes_usage: bool) -> Json:
        """One event."""
        return head.body("cmpl", "text_completion") | _choices_and_usage(choice, usage, includes_usage)

    def _choice(self, part: Part, reason: FinishReason | None) -> Json:
        return {
            "index": part.index,
            "text": part.text,
            "logprobs": part.logprobs,
            "finish_reason": reason and reason.value,
        }


class ChatShape:
    """/v1/chat/completions."""

    def logprobs(self, told: Sequence[ToldToken], speller: Speller) -> Json:
        """What is told of tokens."""
        return chat_logprobs(told, speller)

    def whole(self, head: AnswerHead, choices: Sequence[tuple[Part, FinishReason]], usage: Usage) -> Json:
        """The answer that is not streamed."""
        written = [
            {
                "index": part.index,
                "message": {"role": "assistant", "content": part.text, "refusal": None},
                "logprobs": part.logprobs,
                "finish_reason": reason.value,
            }
            for part, reason in choices
        ]
        return head.body("chatcmpl", "chat.completion") | {"choices": written, "usage": usage.body()}

    def opening(self, index: int) -> Json | None:
        """The role."""
        return self._choice(index, {"role": "assistant", "content": ""})

    def piece(self, part: Part) -> Json:
        """New text."""
        return self._choice(part.index, {"content": part.text}, part.logprobs)

    def closing(self, index: int, reason: FinishReason) -> Json:
        """An empty delta, and why it ended."""
        return self._choice(index, {}, None, reason)

    def chunk(self, head: AnswerHead, choice: Json | None, usage: Usage | None, includes_usage: bool) -> Json:
        """One event."""
        return head.body("chatcmpl", "chat.completion.chunk") | _choices_and_usage(choice, usage, includes_usage)

    def _choice(
        self, index: int, delta: Json, logprobs: Json | None = None, reason: FinishReason | None = None
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason and reason.value}


def _choices_and_usage(choice: Json | None, usage: Usage | None, includes_usage: bool) -> dict[str, object]:
    choices: dict[str, object] = {"choices": [] if choice is None else [choice]}
    if includes_usage:
        choices["usage"] = usage and usage.body()
    return choices
