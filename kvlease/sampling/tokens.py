"""A drawn token, and what is told of it.

Never: holds text; what a token is called is the gateway's to say.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """One token of the answer."""

    token_id: int
