"""Named limits of the load generator.

Never: read at run time from anywhere else; whoever waits gets its `Limits` when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on time, in seconds, and on sizes."""

    #: For one answer to a question about the server, such as its models.
    answer_s: float = 30.0
    #: Of one read: many small events fit, and each is stamped with the time of the read that brought it.
    read_bytes: int = 64 << 10
    #: Of one whole answer: a hundred thousand tokens of the wordiest server.
    max_answer_bytes: int = 64 << 20
    #: Words per token that are tried at first; the server's own count then corrects it.
    words_per_token: float = 1.0
