"""What lies between the two sides: a stream for each attempt, and one channel with its landing ring.

Delays are not states of their own: a frame that was sent lies in the ring, and "arrives" when the receiver takes it. What a break
loses is what nobody has taken.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from kvlease.handoff.messages import AttemptDown, AttemptUp
from kvlease.handoff.wire import decode_down, decode_up, encode_down, encode_up
from transport.ring import ReceiveWindow, SendWindow

NUM_SLOTS = 2

Key = tuple[int, int]  # request, attempt

MESSAGES: list[AttemptUp | AttemptDown] = []  # all that were ever sent; a stream holds their numbers
_NUMBERS: dict[AttemptUp | AttemptDown, int] = {}


def number_of(message: AttemptUp | AttemptDown) -> int:
    if message not in _NUMBERS:
        _NUMBERS[message] = len(MESSAGES)
        MESSAGES.append(message)
    return _NUMBERS[message]


class Stream(NamedTuple):
    """Messages on their way; an end follows them. A side that has ended the stream hears no more of it."""

    up: tuple[int, ...] = ()
    down: tuple[int, ...] = ()
    up_ends: bool = False
    down_ends: bool = False
    decode_hears: bool = True
    prefill_hears: bool = True

    @property
    def is_gone(self) -> bool:
        return not (self.decode_hears or self.prefill_hears)

    def cancelled(self) -> Stream:
        """Decode leaves: what it sent may still arrive before the end, or not."""
        return self._replace(down=(), up_ends=True, decode_hears=False)

    def closed(self) -> Stream:
        """Prefill's call has returned: everything that it said arrives, then the end."""
        return self._replace(up=(), down_ends=True, prefill_hears=False)

    def broken(self) -> Stream:
        return self._replace(up=(), down=(), up_ends=True, down_ends=True)

    def with_up(self, message: AttemptUp) -> Stream:
        """A stream that has ended takes no message, and its reader is who says so."""
        if self.up_ends or not self.prefill_hears:
            return self
        return self._replace(up=(*self.up, number_of(_over_the_wire_up(message))))

    def with_down(self, message: AttemptDown) -> Stream:
        if self.down_ends or not self.decode_hears:
            return self
        return self._replace(down=(*self.down, number_of(_over_the_wire_down(message))))


@lru_cache(4096)
def _over_the_wire_up(message: AttemptUp) -> AttemptUp:
    return decode_up(encode_up(message))


@lru_cache(4096)
def _over_the_wire_down(message: AttemptDown) -> AttemptDown:
    return decode_down(encode_down(message))


class Channel(NamedTuple):
    """One pair: its epoch, who still believes in it, and the ring. Counts are kept small: whole turns of the ring are taken off."""

    epoch: int = 1
    decode_believes: bool = True
    prefill_believes: bool = True
    is_broken: bool = False
    num_sent: int = 0
    num_taken: int = 0
    num_released: int = 0
    slots: tuple[bytes, ...] = (b"",) * NUM_SLOTS

    def send_window(self) -> SendWindow:
        return SendWindow(NUM_SLOTS, self.num_sent, self.num_sent, self.num_released)

    def receive_window(self) -> ReceiveWindow:
        return ReceiveWindow(NUM_SLOTS, self.num_sent, self.num_taken, self.num_released)

    def sent(self, frame: bytes) -> Channel:
        """The frame lies in the landing ring, or nowhere if the channel is broken."""
        send, receive = self.send_window(), self.receive_window()
        number = send.lend()
        send.send(number)
        send.transmit(send.num_sent)
        refusal = receive.refusal(number)
        assert refusal is None, refusal
        receive.arrive()
        changed = self if self.is_broken else self.with_slot(number % NUM_SLOTS, frame)
        return changed._replace(num_sent=send.num_sent)

    def taken(self) -> Channel:
        window = self.receive_window()
        window.take()
        return self._replace(num_taken=window.num_taken)

    def released(self) -> Channel:
        receive, send = self.receive_window(), self.send_window()
        receive.release(receive.num_released)
        fault = send.credit(receive.num_released)
        assert fault is None, fault
        turns = receive.num_released // NUM_SLOTS * NUM_SLOTS
        return self._replace(
            num_sent=self.num_sent - turns,
            num_taken=self.num_taken - turns,
            num_released=receive.num_released - turns,
        )

    def with_slot(self, index: int, frame: bytes) -> Channel:
        return self._replace(slots=tuple(frame if i == index else old for i, old in enumerate(self.slots)))

    @property
    def has_frame(self) -> bool:
        """Whether a frame waits to be taken."""
        return not self.is_broken and self.num_taken < self.num_sent

    @property
    def next_frame(self) -> bytes:
        return self.slots[self.num_taken % NUM_SLOTS]

    @property
    def frame_at_work(self) -> bytes:
        """The frame that was taken last."""
        return self.slots[(self.num_taken - 1) % NUM_SLOTS]

    @property
    def arrived(self) -> range:
        """Numbers of the frames that nobody has released: what a stray write can still spoil."""
        return range(self.num_released, self.num_sent)

    @property
    def has_credit(self) -> bool:
        return self.num_sent - self.num_released < NUM_SLOTS
