"""Named limits and versions of the handoff.

Never: read from configuration; a limit that users may change lives in a server's configuration.
"""

from __future__ import annotations

from dataclasses import dataclass

#: Raised with every change of a message's meaning; both sides of a pair must have the same.
PROTOCOL_VERSION = 2


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one request may cost. Times in seconds."""

    #: A peer or lease that stands still for longer is given up (the second promise about time: progress, apart from the deadline).
    stall_s: float = 2.0
    #: How often each side of a pair shows that it lives: four times within `stall_s`, so one late beat is not a death.
    heartbeat_s: float = 0.5
    #: Attempts at one request. The second takes another candidate where there is one; a third would only add load to a sick cluster.
    max_attempts: int = 2
    #: How many later, smaller requests may be given room before the one at the head of the queue: bounds its wait by their run time.
    max_bypass: int = 8
    #: Texts of one request. Each holds room of its own, all at once, for prompt + max_tokens less the whole blocks of the prompt.
    max_choices: int = 16
    #: Tokens that end a text: a model's own, and those that a client names. Looked up with every token.
    max_end_tokens: int = 256
