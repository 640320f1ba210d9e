"""Errors of the gateway.

    GatewayError
    ├── RequestRefused   one request ends with the `ApiError` it carries; not retryable as it is, unless that says 429 or 503
    └── StartRefused     the gateway cannot start; the message says what to change

Never: reach a client in any other shape than OpenAI's.
"""

from __future__ import annotations

from typing import ClassVar

from gateway.openai_errors import ApiError


class GatewayError(Exception):
    """Root of this tree."""


class RequestRefused(GatewayError):
    """Ends one request with a proper answer."""

    def __init__(self, error: ApiError) -> None:
        """`error` is what the client gets."""
        super().__init__(f"{error.http_status} {error.code}: {error.message}")
        self.error = error


class StartRefused(GatewayError):
    """One line for whoever started it: what is wrong and what to change."""

    exit_code: ClassVar[int] = 2  # of the process: its configuration was refused
