"""What is read from and written to a connection, as plain state machines: which bytes next, and what they mean.

`FrameReader` and `CreditReader` say where the next bytes may be put and judge what came; `Outbox` says what to write.
A header is judged before one byte of its payload is placed.

Never: does I/O; every chunking of the same bytes gives the same result.
"""

from __future__ import annotations

from collections import deque
from itertools import islice
from typing import Protocol

from transport.ends import ReceiveSide, SendSide
from transport.tcp.wire import CREDIT, FRAME, MESSAGE_BYTES, PROBE, unpack_message


class Reader(Protocol):
    """Takes the bytes of one direction."""

    def buffers(self) -> list[memoryview]:
        """Where the next bytes go, in this order; at least one byte of room."""

    def filled(self, num_bytes: int) -> str | None:
        """So many bytes were put there; returns what was wrong with them, if anything. Not called again after a fault."""


class FrameReader:
    """Places frames into the landing ring. The header of the next frame is read in one go with the end of a payload."""

    def __init__(self, side: ReceiveSide) -> None:
        """Frames go to `side`."""
        self._side = side
        self._header = memoryview(bytearray(MESSAGE_BYTES))
        self._num_header_bytes = 0
        self._payload: memoryview | None = None
        self._num_placed = 0

    def buffers(self) -> list[memoryview]:
        """The rest of the payload and the next header, or the rest of a header."""
        if self._payload is None:
            return [self._header[self._num_header_bytes :]]
        return [self._payload[self._num_placed :], self._header]

    def filled(self, num_bytes: int) -> str | None:
        """Account for bytes placed in `buffers`."""
        if self._payload is not None:
            num_placed = min(num_bytes, len(self._payload) - self._num_placed)
            self._num_placed += num_placed
            num_bytes -= num_placed
            if self._num_placed < len(self._payload):
                return None
            self._side.arrive(self._num_placed)
            self._payload = None
        self._num_header_bytes += num_bytes
        return self._judge_header() if self._num_header_bytes == MESSAGE_BYTES else None

    def _judge_header(self) -> str | None:
        self._num_header_bytes = 0
        message = unpack_message(self._header)
        if message.kind == PROBE and message.num_bytes == 0:
            return None
        if message.kind != FRAME:
            return f"{message} where a frame or a probe was due"
        fault = self._side.refusal(message.number, message.num_bytes)
        if fault is None:
            self._payload = self._side.target()[: message.num_bytes]
            self._num_placed = 0
        return fault


class CreditReader:
    """Reads credits, many at a time: the last whole one counts, but each is judged."""

    def __init__(self, side: SendSide) -> None:
        """Credits go to `side`."""
        self._side = side
        self._memory = memoryview(bytearray(64 * MESSAGE_BYTES))
        self._num_filled = 0

    def buffers(self) -> list[memoryview]:
        """Room behind an unfinished message."""
        return [self._memory[self._num_filled :]]

    def filled(self, num_bytes: int) -> str | None:
        """Judge the messages that are whole and keep the unfinished one."""
        end = self._num_filled + num_bytes
        num_whole_bytes = end - end % MESSAGE_BYTES
        for start in range(0, num_whole_bytes, MESSAGE_BYTES):
            message = unpack_message(self._memory[start : start + MESSAGE_BYTES])
            if message.kind != CREDIT or message.num_bytes:
                return f"{message} where a credit was due"
            fault = self._side.credit(message.number)
            if fault is not None:
                return fault
        self._num_filled = end - num_whole_bytes
        self._memory[: self._num_filled] = bytes(self._memory[num_whole_bytes:end])
        return None


class Outbox:
    """Messages on their way to the socket, payloads as views of the departure ring."""

    def __init__(self) -> None:
        """Empty."""
        self._parts: deque[tuple[memoryview, bool]] = deque()
        self.num_payloads_written = 0

    def __len__(self) -> int:
        """Parts that are not wholly written."""
        return len(self._parts)

    def push(self, message: bytes, payload: memoryview | None = None) -> None:
        """Queue a message with its payload, if it has one."""
        self._parts.append((memoryview(message), False))
        if payload is not None:
            self._parts.append((payload, True))

    def next_parts(self, max_parts: int) -> list[memoryview]:
        """What to write next."""
        return [part for part, _ in islice(self._parts, max_parts)]

    def written(self, num_bytes: int) -> None:
        """So many bytes of `next_parts` went out."""
        while num_bytes:
            part, is_payload = self._parts.popleft()
            if num_bytes < len(part):
                self._parts.appendleft((part[num_bytes:], is_payload))
                return
            num_bytes -= len(part)
            self.num_payloads_written += is_payload

    def clear(self) -> None:
        """Drop everything: the ring is about to go."""
        self._parts.clear()
