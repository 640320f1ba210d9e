"""Named limits of the engine.

Never: read at run time from anywhere else; a runner gets its `Limits` when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one forward pass may hold, and one turn of an event loop."""

    #: New tokens in one pass. Activations grow with it (tens of kilobytes a token in a small model), and so does the time until an abort is seen.
    max_step_tokens: int = 8192
    #: Bytes of a ring's blocks that are copied in the event loop between two of its turns: a mebibyte and its seal, 0.3 ms, as a channel's turn.
    max_copy_here_bytes: int = (1 << 20) + (4 << 10)
    #: Tokens ranked before a nucleus falls back to sorting the whole vocabulary. Nearly every nucleus of a real text is far smaller.
    nucleus_candidates: int = 1024
