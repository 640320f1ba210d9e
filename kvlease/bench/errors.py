"""Errors of the measurements.

    BenchFailed             a measurement cannot be made or was spoiled; one line, `exit_code` for the command
    └── PartnerFailed       the other process of a measurement ended, or said why it cannot go on

Never retryable: a figure is measured again by starting again.
"""

from __future__ import annotations


class BenchFailed(Exception):
    """Root of this tree."""

    exit_code = 1


class PartnerFailed(BenchFailed):
    """The other process; the message is its own."""
