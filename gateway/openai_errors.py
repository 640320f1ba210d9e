"""Errors as OpenAI's clients expect them, and how a verdict becomes one.

Never: invents a reason: what another server said goes to the client unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlease.handoff.messages import Aborted, Rejected

MAX_ECHO_CHARS = 64
RETRY_LATER = frozenset({429, 503})


@dataclass(frozen=True, slots=True)
class ApiError:
    """One answer that is not a text: its HTTP status and the four fields of OpenAI's error object."""

    http_status: int
    message: str
    code: str
    param: str | None = None
    headers: tuple[tuple[str, str], ...] = ()

    def __post_init__(self) -> None:
        """Refuse a status that no error has."""
        if not 400 <= self.http_status < 600:
            raise ValueError(f"an error's HTTP status is 400 to 599, got {self.http_status}")

    @property
    def type(self) -> str:
        """OpenAI's coarse class, which its client libraries do not read but people do."""
        if self.http_status == 429:
            return "rate_limit_error"
        return "invalid_request_error" if self.http_status < 500 else "server_error"

    def body(self) -> dict[str, object]:
        """The JSON object that the client gets."""
        return {"error": {"message": self.message, "type": self.type, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None, code: str = "invalid_value") -> ApiError:
    """A 400: the client must change its request."""
    return ApiError(400, message, code, param)


def unavailable(message: str, code: str, retry_after_s: int, http_status: int = 503) -> ApiError:
    """A 503 or 429: the same request may succeed later."""
    return ApiError(http_status, message, code, headers=(("retry-after", str(retry_after_s)),))


def too_long(num_prompt_tokens: int, max_tokens: int, max_model_len: int, param: str) -> ApiError:
    """A 400 with the three numbers that do not fit together; `max_tokens` 0: the prompt alone is too long."""
    asked = f"{num_prompt_tokens} in the prompt" + (f" and {max_tokens} for the answer" if max_tokens else "")
    return invalid(
        f"This model's maximum context length is {max_model_len} tokens, but {num_prompt_tokens + max_tokens} tokens "
        f"were asked for ({asked}). Shorten the prompt or ask for fewer tokens.",
        param,
        "context_length_exceeded",
    )


def from_verdict(verdict: Rejected | Aborted, retry_after_s: int) -> ApiError:
    """The verdict of another server: status, code, message and param as they came."""
    status = verdict.http_status
    param = verdict.param or None if isinstance(verdict, Rejected) else None
    headers = (("retry-after", str(retry_after_s)),) if status in RETRY_LATER else ()
    return ApiError(status, verdict.message, verdict.code or str(verdict.reason), param, headers)


def echo(name: str) -> str:
    """A client's own word, short enough to be said back."""
    return name if len(name) <= MAX_ECHO_CHARS else name[:MAX_ECHO_CHARS] + "…"
