"""Named limits of the command.

Never: read at run time from anywhere else; whoever waits gets its `Limits` when it is made.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on time, in seconds, and on tries."""

    #: First pause before a dead server is started again: long enough for the kernel to clean up, short for clients.
    restart_first_s: float = 0.5
    #: Longest pause between starts of a server that keeps dying; its peers probe more often than this.
    restart_most_s: float = 15.0
    #: A server that ran this long is healthy again: its next death starts from the first pause.
    restart_forget_s: float = 60.0
    #: Starts of one server that may end before it ever listened. What fails three times will fail again.
    max_failed_starts: int = 3
    #: Between two looks at the gateway's /ready while starting; loopback, so it costs nothing.
    ready_poll_s: float = 0.1
    #: For one answer from a gateway. A live one needs milliseconds; a busy host a second or two.
    answer_s: float = 5.0
    #: For the last lines of a dead server, whose pipes may be held open by something it started.
    last_words_s: float = 1.0
    #: Of one log line that is kept together; a longer one is split.
    max_log_line_bytes: int = 64 << 10
    #: Of a cluster's secret that may be used beyond this machine: 16 characters of hex are 64 bits.
    min_secret_chars: int = 16
    #: Of an answer from a gateway's /status: hundreds of servers with hundreds of pairs.
    max_answer_bytes: int = 16 << 20
    #: Of the configuration a supervised server reads from its parent: thousands of API keys.
    max_document_bytes: int = 4 << 20
