"""What an answer of OpenAI's streaming API says, event by event.

Never: reads a clock; whoever feeds it says when.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field


@dataclass(slots=True)
class Sighting:
    """One request as its client saw it; times in seconds of one clock. `error` is a kind, empty for a good answer.

    `pieces`: when each event with text came. `num_tokens`: what the server counted, else the events with text.
    """

    started: float
    pieces: list[float] = field(default_factory=list)
    ended: float = 0.0
    error: str = ""
    num_prompt_tokens: int = 0
    num_counted_tokens: int = 0

    @property
    def num_tokens(self) -> int:
        """Generated tokens."""
        return self.num_counted_tokens or len(self.pieces)

    @property
    def first_token_s(self) -> float:
        """From the request to its first text."""
        return self.pieces[0] - self.started

    @property
    def gaps_s(self) -> list[float]:
        """Between one event with text and the next."""
        return [after - before for before, after in zip(self.pieces, self.pieces[1:], strict=False)]

    @property
    def per_token_s(self) -> float | None:
        """Time per token after the first; None where there is only one."""
        if self.num_tokens < 2 or len(self.pieces) < 2:
            return None
        return (self.pieces[-1] - self.pieces[0]) / (self.num_tokens - 1)

    def take(self, event: bytes, now: float) -> bool:
        """One event's data; whether it was the last one."""
        if event == b"[DONE]":
            return True
        try:
            body = json.loads(event)
        except ValueError:
            self.error = "an event that is no JSON"
            return True
        if not isinstance(body, dict):
            self.error = "an event that is no object"
            return True
        if error := body.get("error"):
            self.error = f"error event: {_code(error)}"
            return True
        usage = body.get("usage")
        if isinstance(usage, dict):
            self.num_counted_tokens = int(usage.get("completion_tokens") or 0)
            self.num_prompt_tokens = int(usage.get("prompt_tokens") or 0)
        if any(_text(choice) for choice in body.get("choices") or ()):
            self.pieces.append(now)
        return False


def refusal(status: int, body: bytes) -> str:
    """The kind of error that an answer without status 200 is."""
    try:
        found = json.loads(body)
    except ValueError:
        return f"HTTP {status}"
    error = found.get("error") if isinstance(found, dict) else None
    return f"HTTP {status}: {_code(error)}" if error else f"HTTP {status}"


def _code(error: object) -> str:
    if isinstance(error, dict):
        return str(error.get("code") or error.get("type") or "error")
    return str(error)[:80]


def _text(choice: object) -> str:
    """Of a completion, or of a chat's delta, reasoning included."""
    if not isinstance(choice, dict):
        return ""
    delta = choice.get("delta")
    place = delta if isinstance(delta, dict) else choice
    return str(place.get("text") or place.get("content") or place.get("reasoning_content") or "")
