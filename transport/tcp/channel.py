"""The two ends of a tcp channel: they join the shared loans and waiting to one connection.

Never: decides who may connect (the listener does), or reads a header (the streams do).
"""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Callable

from transport.contract import ChannelStatistics, RingGeometry, Slot
from transport.ends import ReceiveSide, SendSide
from transport.errors import ChannelBroken, ChannelClosed
from transport.limits import Limits
from transport.tcp.connection import Connection
from transport.tcp.dial import dial
from transport.tcp.streams import CreditReader, FrameReader
from transport.tcp.wire import CREDIT, FRAME, PROBE, RANDOM_BYTES, Message, Offer, unpack_answer


class TcpDeparture:
    """The sending end."""

    def __init__(self, geometry: RingGeometry, limits: Limits, forget: Callable[[], None]) -> None:
        """Wait for the landing side, at most `Limits.establish_s`; `forget` takes it off the listener."""
        self._side = SendSide(geometry)
        self._limits = limits
        self._forget = forget
        self._connection: Connection | None = None
        reason = f"the landing side did not connect within {limits.establish_s:g} s"
        self._deadline = asyncio.get_running_loop().call_later(limits.establish_s, self.on_lost, reason)

    def accept(self, stream: socket.socket) -> None:
        """The landing side is here and has proven itself."""
        self._deadline.cancel()
        self._connection = Connection(stream, CreditReader(self._side), self, self._limits)
        self._side.connect()

    async def ready(self) -> None:
        """Wait until the landing side is connected."""
        await self._side.ready()

    async def reserve(self) -> Slot:
        """Wait for a credit and lend the next slot."""
        return await self._side.reserve()

    def send(self, slot: Slot, num_bytes: int) -> None:
        """Queue the slot; the ring bounds the queue."""
        payload = self._side.send(slot, num_bytes)
        assert self._connection is not None, "slots are lent only when connected"
        self._connection.outbox.push(Message(FRAME, num_bytes, slot.sequence_number).pack(), payload)
        self._connection.schedule_flush()

    def give_back(self, slot: Slot) -> None:
        """Return the lent slot unsent."""
        self._side.give_back(slot)

    def statistics(self) -> ChannelStatistics:
        """Frames and bytes sent, credits that came back."""
        return self._side.statistics()

    async def close(self) -> None:
        """End the channel; what was not written yet is dropped."""
        self._deadline.cancel()
        self._forget()
        if self._connection is not None:
            self._connection.close()
        self._side.close()

    def on_written(self) -> None:
        """Frames left the ring: only these may be credited."""
        assert self._connection is not None, "only a connection calls this"
        self._side.window.transmit(self._connection.outbox.num_payloads_written)

    def on_lost(self, reason: str) -> None:
        """The connection is over, or never came."""
        self._forget()
        self._side.state.break_off(f"tcp departure: {reason}")

    def probe(self) -> bytes:
        """Shows life when there is nothing to send."""
        return Message(PROBE, 0, 0).pack()


class TcpLanding:
    """The receiving end."""

    def __init__(self, geometry: RingGeometry, secret: bytes, limits: Limits) -> None:
        """Map the ring and draw the challenge."""
        self._side = ReceiveSide(geometry)
        self._offer = Offer(geometry, secrets.token_bytes(RANDOM_BYTES))
        self._secret = secret
        self._limits = limits
        self._connection: Connection | None = None
        self._dialing: asyncio.Task[socket.socket] | None = None
        self._is_credit_due = False

    @property
    def offer(self) -> bytes:
        """Geometry and challenge."""
        return self._offer.pack()

    async def establish(self, answer: bytes) -> None:
        """Connect to where the answer says, prove ourselves and have the departure side prove itself. Once."""
        self._side.state.check()
        assert self._dialing is None, "a landing end is established once"
        parsed = unpack_answer(answer)
        if isinstance(parsed, str):
            raise self._broken(f"establish: {parsed}")
        self._dialing = asyncio.ensure_future(dial(parsed, self._offer, self._secret, self._limits.establish_s))
        try:
            stream = await self._dialing
        except ChannelBroken as error:
            raise self._broken(f"establish: {error}") from error
        except asyncio.CancelledError:
            await self._abandon_dialing()
            if not _is_being_cancelled():
                self._side.state.check()
            self.on_lost("establish was cancelled")
            raise
        if self._side.state.is_closed:
            stream.close()
            self._side.state.check()
        self._connection = Connection(stream, FrameReader(self._side), self, self._limits)

    async def receive(self) -> Slot:
        """Wait for the next frame."""
        return await self._side.receive()

    def release(self, slot: Slot) -> None:
        """Give the slot back; credits of one turn of the loop leave as one message."""
        if self._side.release(slot) and self._connection is not None and not self._is_credit_due:
            self._is_credit_due = True
            asyncio.get_running_loop().call_soon(self._send_credit)

    def statistics(self) -> ChannelStatistics:
        """Frames and bytes that arrived whole, credits given."""
        return self._side.statistics()

    async def close(self) -> None:
        """End the channel; when this returns no byte lands any more."""
        if self._connection is not None:
            self._connection.close()
        self._side.close()
        await self._abandon_dialing()

    def on_written(self) -> None:
        """Nothing depends on it."""

    def on_lost(self, reason: str) -> None:
        """The connection is over."""
        self._side.state.break_off(f"tcp landing: {reason}")

    def probe(self) -> bytes:
        """The credits once more: a total may be repeated."""
        return Message(CREDIT, 0, self._side.window.num_released).pack()

    def _send_credit(self) -> None:
        self._is_credit_due = False
        assert self._connection is not None, "credits are given for frames that came"
        if self._side.state.is_open and not self._connection.outbox:
            self._connection.outbox.push(self.probe())
            self._connection.schedule_flush()

    async def _abandon_dialing(self) -> None:
        """End a connection that is being made, or was made and found no taker."""
        if self._dialing is None or self._connection is not None:
            return
        self._dialing.cancel()
        await asyncio.wait([self._dialing])
        if not self._dialing.cancelled() and self._dialing.exception() is None:
            self._dialing.result().close()

    def _broken(self, reason: str) -> ChannelBroken | ChannelClosed:
        self.on_lost(reason)
        error = self._side.state.error()
        assert isinstance(error, ChannelBroken | ChannelClosed), "an end that was just broken has a reason"
        return error


def _is_being_cancelled() -> bool:
    """Did somebody cancel the task that runs now (and not only what it waited for)?"""
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
