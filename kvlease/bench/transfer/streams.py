"""The yardsticks that need no kvlease: copying blocks in one process, and one plain TCP stream between two.

Both are written the fastest simple way: the stream sends and receives one buffer that stays in the cache, again and again, and
neither looks at what it moved.

Never: uses a ring, a frame or an event loop.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Sequence

from kvlease.bench.errors import BenchFailed
from kvlease.bench.limits import Limits


def copy_s(source: memoryview, target: memoryview, block_bytes: int, order: Sequence[int]) -> float:
    """Seconds to copy every block of `source` to the same place of `target`, in this order."""
    started = time.monotonic()
    for index in order:
        start = index * block_bytes
        target[start : start + block_bytes] = source[start : start + block_bytes]
    return time.monotonic() - started


class StreamEnd:
    """One end of the plain stream, blocking. Times are of the machine's monotonic clock (s)."""

    def __init__(self, sock: socket.socket, limits: Limits) -> None:
        """Takes the connected socket over."""
        self._sock, self._buffer = sock, memoryview(bytearray(limits.stream_chunk_bytes))
        sock.settimeout(limits.answer_s)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for option in (socket.SO_SNDBUF, socket.SO_RCVBUF):
            sock.setsockopt(socket.SOL_SOCKET, option, limits.stream_buffer_bytes)

    def send(self, num_bytes: int) -> float:
        """Send so many bytes; when it began."""
        started = time.monotonic()
        while num_bytes:
            part = min(num_bytes, len(self._buffer))
            self._sock.sendall(self._buffer[:part])
            num_bytes -= part
        return started

    def receive(self, num_bytes: int) -> float:
        """Receive so many bytes; when the last one was here."""
        while num_bytes:
            found = self._sock.recv_into(self._buffer, min(num_bytes, len(self._buffer)))
            if not found:
                raise BenchFailed("the plain stream ended too soon")
            num_bytes -= found
        return time.monotonic()

    def close(self) -> None:
        """End it."""
        self._sock.close()
