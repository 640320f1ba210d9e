"""The JSON objects of OpenAI's two answers, whole and in chunks.

Never: decides anything; it writes down what was generated.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from kvlease.handoff.messages import FinishReason

Json = Mapping[str, object]


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


class AnswerShape(Protocol):
    """One API's way to write an answer."""

    def whole(self, head: AnswerHead, text: str, reason: FinishReason, usage: Usage) -> Json:
        """The answer that is not streamed."""
        ...

    def opening(self) -> Json | None:
        """The choice that opens a stream, if there is one."""
        ...

    def piece(self, text: str) -> Json:
        """A choice with new text."""
        ...

    def closing(self, reason: FinishReason) -> Json:
        """The choice that ends the text."""
        ...

    def chunk(self, head: AnswerHead, choice: Json | None, usage: Usage | None, includes_usage: bool) -> Json:
        """One event of a stream; with `includes_usage` every event has the field, and the last one its value."""
        ...


class CompletionShape:
    """/v1/completions."""

    def whole(self, head: AnswerHead, text: str, reason: FinishReason, usage: Usage) -> Json:
        """The answer that is not streamed."""
        return head.body("cmpl", "text_completion") | {"choices": [self._choice(text, reason)], "usage": usage.body()}

    def opening(self) -> Json | None:
        """Nothing opens it."""
        return None

    def piece(self, text: str) -> Json:
        """New text."""
        return self._choice(text, None)

    def closing(self, reason: FinishReason) -> Json:
        """No text, and why it ended."""
        return self._choice("", reason)

    def chunk(self, head: AnswerHead, choice: Json | None, usage: Usage | None, includes_usage: bool) -> Json:
        """One event."""
        return head.body("cmpl", "text_completion") | _choices_and_usage(choice, usage, includes_usage)

    def _choice(self, text: str, reason: FinishReason | None) -> Json:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reason and reason.value}


class ChatShape:
    """/v1/chat/completions."""

    def whole(self, head: AnswerHead, text: str, reason: FinishReason, usage: Usage) -> Json:
        """The answer that is not streamed."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason.value}
        return head.body("chatcmpl", "chat.completion") | {"choices": [choice], "usage": usage.body()}

    def opening(self) -> Json | None:
        """The role."""
        return self._choice({"role": "assistant", "content": ""}, None)

    def piece(self, text: str) -> Json:
        """New text."""
        return self._choice({"content": text}, None)

    def closing(self, reason: FinishReason) -> Json:
        """An empty delta, and why it ended."""
        return self._choice({}, reason)

    def chunk(self, head: AnswerHead, choice: Json | None, usage: Usage | None, includes_usage: bool) -> Json:
        """One event."""
        return head.body("chatcmpl", "chat.completion.chunk") | _choices_and_usage(choice, usage, includes_usage)

    def _choice(self, delta: Json, reason: FinishReason | None) -> Json:
        return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason and reason.value}


def _choices_and_usage(choice: Json | None, usage: Usage | None, includes_usage: bool) -> dict[str, object]:
    choices: dict[str, object] = {"choices": [] if choice is None else [choice]}
    if includes_usage:
        choices["usage"] = usage and usage.body()
    return choices
