"""Errors of the handoff.

    HandoffError
    └── IllegalMove    an event that the role's state table has no place for; the state is unchanged

What a client or peer may cause in the ordinary course is a value (`Rejected`, `Aborted`), not an error.
"""

from __future__ import annotations


class HandoffError(Exception):
    """Root of this tree."""


class IllegalMove(HandoffError):
    """`event` is not possible for `role` in `state`."""

    def __init__(self, role: str, state: str, event: str) -> None:
        """Name all three."""
        super().__init__(f"{role} cannot take {event} while {state}")
        self.role, self.state, self.event = role, state, event
