"""Named limits of the logs.

Never: read from a configuration; these protect whoever reads the logs.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one line may hold."""

    #: Of one field's text. A foreign message may be long, and a line should fit a screen; the rest is dropped with an ellipsis.
    max_value_chars: int = 500


LIMITS = Limits()
