"""Asks a gateway over HTTP, with nothing but the standard library, so that the command starts quickly.

Never: goes through a proxy; follows a redirect.
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass
from urllib.parse import urlsplit

from kvlease.cli.errors import Unreachable
from kvlease.cli.limits import Limits


@dataclass(frozen=True, slots=True)
class Answer:
    """Of one GET."""

    status: int
    body: bytes

    def json(self) -> dict[str, object]:
        """The body as a JSON object. Raises Unreachable when it is none."""
        try:
            value = json.loads(self.body)
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise Unreachable("the answer is not a JSON object; is this a kvlease gateway?")
        return value


def get(url: str, path: str, limits: Limits, api_key: str = "") -> Answer:
    """GET `path` at the gateway `url`. Raises Unreachable with one line."""
    parts = urlsplit(url)
    make = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    try:
        connection = make(parts.hostname or "", parts.port, timeout=limits.answer_s)
        try:
            connection.request("GET", parts.path.rstrip("/") + path, headers=headers)
            response = connection.getresponse()
            return Answer(response.status, response.read(limits.max_answer_bytes))
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise Unreachable(f"no gateway answers at {url}: {str(error) or type(error).__name__}") from None
