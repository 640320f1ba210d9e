"""Named limits of the transports.

Never: read at run time from anywhere else; a transport gets its `Limits` when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on time, in seconds, and on what a peer may make us hold."""

    #: From the answer to the first byte of the landing side's hello. Loopback needs milliseconds; a busy host a second or two.
    establish_s: float = 5.0
    #: How long a dead peer may go unnoticed: promised by the contract, and shorter than any request's deadline.
    death_s: float = 2.0
    #: How often an idle end shows that it lives; three of these fit into `death_s`.
    probe_s: float = 0.5
    #: Connections that have not said hello yet. More are closed at once, so strangers cannot fill the descriptor table.
    max_pending_hellos: int = 64
