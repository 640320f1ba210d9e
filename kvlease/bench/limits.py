"""Named limits of the measurements.

Never: read at run time from anywhere else; a measurement gets its `Limits` when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on time, in seconds, and on sizes."""

    #: For one answer of the other process, the transfer that it waits for included. A round takes well under a second.
    answer_s: float = 60.0
    #: For the other process to end by itself once its input is closed.
    leave_s: float = 5.0
    #: For the other process to load a model for the decode load; a cold page cache and a busy core.
    engine_s: float = 180.0
    #: Of one line between the two processes: arrival times of a few thousand blocks.
    max_line_bytes: int = 4 << 20
    #: Between two blocks of a latency measurement: long enough that each one meets an idle channel.
    pace_s: float = 0.001
    #: Of one read and one write of the plain stream, which so stays within a core's cache.
    stream_chunk_bytes: int = 1 << 20
    #: Socket buffers of the plain stream; the kernel may give less.
    stream_buffer_bytes: int = 4 << 20
    #: Of decoding without any transfer beside it, to compare with.
    engine_alone_s: float = 3.0
    #: For a server or a whole cluster to say that it is there; a first start fetches and converts a model.
    start_s: float = 300.0
    #: For one attempt or one rejection of the handoff measurement.
    attempt_s: float = 30.0
    #: For one section of the whole suite.
    section_s: float = 900.0
