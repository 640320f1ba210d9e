"""Errors between servers.

    PeeringError
    ├── PairRefused       the other side will not pair with us; the message says what to change
    └── PairLost          the pair ended: its stream, its channel or its heartbeat

Both end one pair. Attempts that stood on it end as `Aborted` values with the same text.
"""

from __future__ import annotations


class PeeringError(Exception):
    """Root of this tree."""


class PairRefused(PeeringError):
    """Versions, models, layouts or pools that cannot work together."""


class PairLost(PeeringError):
    """The pair was alive, and is not any more."""
