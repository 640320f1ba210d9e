"""One open connection in the event loop: moves bytes between its socket, a reader and an outbox, and knows that its peer lives.

Everything happens in callbacks of the loop, so that after `close` has returned nothing can touch a ring: no thread and no
kernel holds a view of it. Measured against one blocking thread for each direction, this was as fast or faster (the
threads pay for each frame with a change of the interpreter lock), and it has nothing to join.

Never: knows a frame from a credit.
"""

from __future__ import annotations

import asyncio
import os
import socket
from typing import Protocol

from transport.life import TICKS_PER_PROBE, Watch, max_still_ticks, tick_s
from transport.limits import Limits
from transport.tcp.streams import Outbox, Reader


class Owner(Protocol):
    """The end of a channel that uses the connection."""

    def on_written(self) -> None:
        """Bytes of the outbox went out."""

    def on_lost(self, reason: str) -> None:
        """The connection is over and already closed."""

    def probe(self) -> bytes:
        """A message that shows life."""


class Connection:
    """Drives a connected non-blocking socket until `close`, or until it is lost."""

    def __init__(self, stream: socket.socket, reader: Reader, owner: Owner, limits: Limits) -> None:
        """Start reading at once, in the running loop."""
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream
        self._reader = reader
        self._owner = owner
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._outbox = Outbox()
        self._is_open = True
        self._is_flush_due = False
        self._is_writer_set = False
        self._watch_in = Watch()
        self._watch_out = Watch()
        self._loop.add_reader(stream, self._on_readable)
        self._num_ticks = 0
        self._ticker = self._loop.call_later(tick_s(limits), self._tick)

    @property
    def outbox(self) -> Outbox:
        """What waits to be written; `schedule_flush` after a push."""
        return self._outbox

    def schedule_flush(self) -> None:
        """Write soon; pushes until then leave in one call."""
        if self._is_open and not self._is_flush_due and not self._is_writer_set:
            self._is_flush_due = True
            self._loop.call_soon(self._flush)

    def close(self) -> None:
        """Stop all reading and writing; when this returns no byte can land any more. Idempotent."""
        if not self._is_open:
            return
        self._is_open = False
        self._ticker.cancel()
        self._loop.remove_reader(self._stream)
        self._loop.remove_writer(self._stream)
        self._outbox.clear()
        self._stream.close()

    def _on_readable(self) -> None:
        num_left = self._limits.max_bytes_per_turn
        while num_left > 0 and self._is_open:
            try:
                num_bytes = self._stream.recvmsg_into(self._reader.buffers())[0]
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:
                self._lose(f"recvmsg: {_name(error)}")
                return
            if num_bytes == 0:
                self._lose("the peer closed the connection")
                return
            num_left -= num_bytes
            self._watch_in.num_moved += num_bytes
            fault = self._reader.filled(num_bytes)
            if fault is not None:
                self._lose(f"the peer broke the protocol: {fault}")
                return

    def _flush(self) -> None:
        self._is_flush_due = False
        if not self._is_open:
            return
        num_left = self._limits.max_bytes_per_turn
        while num_left > 0 and self._outbox and self._is_open:
            try:
                num_bytes = self._stream.sendmsg(self._outbox.next_parts(self._limits.max_parts_per_write))
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:
                self._lose(f"sendmsg: {_name(error)}")
                return
            num_left -= num_bytes
            self._watch_out.num_moved += num_bytes
            self._outbox.written(num_bytes)
        self._owner.on_written()
        self._await_room()

    def _await_room(self) -> None:
        is_wanted = bool(self._outbox) and self._is_open
        if is_wanted and not self._is_writer_set:
            self._loop.add_writer(self._stream, self._flush)
        elif self._is_writer_set and not is_wanted and self._is_open:
            self._loop.remove_writer(self._stream)
        self._is_writer_set = is_wanted

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(tick_s(self._limits), self._tick)
        self._num_ticks += 1
        max_ticks = max_still_ticks(self._limits)
        if self._watch_in.still_for() >= max_ticks:
            self._lose(f"nothing came from the peer for {max_ticks * tick_s(self._limits):g} s")
        elif not self._outbox:
            self._watch_out.reset()
            if self._num_ticks % TICKS_PER_PROBE == 0:
                self._outbox.push(self._owner.probe())
                self.schedule_flush()
        elif self._watch_out.still_for() >= max_ticks:
            self._lose(f"the peer has read nothing for {max_ticks * tick_s(self._limits):g} s")

    def _lose(self, reason: str) -> None:
        self.close()
        self._owner.on_lost(reason)


def _name(error: OSError) -> str:
    return os.strerror(error.errno) if error.errno is not None else str(error)
