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
    #: Bytes moved for one channel before the event loop looks at anything else: about 0.3 ms of copying.
    max_bytes_per_turn: int = 1 << 20
    #: Buffers in one write call; the kernel takes 1024, and small frames gain nothing beyond a few dozen.
    max_parts_per_write: int = 64
    #: RDMA writes that wait for their acknowledgement: enough to keep a wire busy, and the send queue stays small.
    max_writes_in_flight: int = 32
    #: Unsignalled RDMA writes in a row: a completion is work for the loop, but slots are free only after one.
    max_unsignalled_writes: int = 8
    #: Bytes of consecutive slots in one RDMA write: longer ones gain nothing, and are seen only once whole.
    max_run_bytes: int = 1 << 20
    #: RDMA completions handled before the event loop looks at anything else.
    max_completions_per_turn: int = 64
    #: Receives beyond one a slot, for messages of a peer that goes on while this process is held up.
    num_message_receives: int = 16
    #: Pause of the listener when the host is out of descriptors or memory, so that it does not spin.
    accept_pause_s: float = 0.5

    def __post_init__(self) -> None:
        """Refuse bounds under which a live peer would be called dead."""
        if min(self.establish_s, self.probe_s, self.accept_pause_s) <= 0 or self.death_s < 3 * self.probe_s:
            raise ValueError(f"death_s must hold three positive probe_s, got {self}")
