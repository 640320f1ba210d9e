"""What telemetry refuses.

    ValueError
    └── UnknownLogLevel

Never: raised while logging; a line that cannot be written is lost, not the request it tells of.
"""

from __future__ import annotations


class UnknownLogLevel(ValueError):
    """The configured level is none of those that exist. Not retryable: the start stops with this one line."""
