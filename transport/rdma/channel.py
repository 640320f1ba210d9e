"""The two ends of an rdma channel: they join the shared loans and waiting to one connection.

Never: touches a verb, or decides which device is used.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from transport.contract import ChannelStatistics, RingGeometry, Slot
from transport.ends import ReceiveSide, SendSide
from transport.errors import ChannelBroken, ChannelClosed, TransportRefused, VerbsError
from transport.limits import Limits
from transport.rdma.connection import Connection, Plan
from transport.rdma.devices import Link
from transport.rdma.runs import take_run
from transport.rdma.verbs import Device
from transport.rdma.wire import CREDIT, PROBE, Message, Offer, unpack_answer

_IMMEDIATE_MODULUS = 1 << 32


class RdmaDeparture:
    """The sending end: the active writer. Nobody may write into its memory."""

    def __init__(self, device: Device, link: Link, offer: Offer, limits: Limits, forget: Callable[[], None]) -> None:
        """Connect to the offered queue pair and wait for the landing side's first credit, at most `Limits.establish_s`."""
        self._geometry = offer.geometry
        self._target = (offer.ring_address, offer.ring_key)
        self._limits = limits
        self._forget = forget
        self._side = SendSide(offer.geometry)
        self._waiting: deque[tuple[int, int]] = deque()
        self._num_frames_after_write: deque[tuple[int, int]] = deque()
        self._num_posted = self._num_released = self._num_writes = self._num_unsignalled = 0
        self._is_flush_due = False
        self._num_run_frames = max(1, limits.max_run_bytes // offer.geometry.slot_bytes)
        plan = Plan(
            link, num_receives=limits.num_message_receives, num_sends=limits.max_writes_in_flight, may_be_written=False
        )
        self._connection = _connection(device, plan, self._side, self, limits)
        try:
            self._connection.connect(offer.queue_pair)
        except (VerbsError, OSError) as error:
            _release(self._connection, self._side)
            raise TransportRefused(f"{link}: {error}") from error
        reason = f"the landing side did not connect within {limits.establish_s:g} s"
        self._deadline = asyncio.get_running_loop().call_later(limits.establish_s, self._connection.lose, reason)

    @property
    def connection(self) -> Connection:
        """Its connection, for the answer."""
        return self._connection

    async def ready(self) -> None:
        """Wait until the landing side is connected."""
        await self._side.ready()

    async def reserve(self) -> Slot:
        """Wait for a credit and lend the next slot."""
        return await self._side.reserve()

    def send(self, slot: Slot, num_bytes: int) -> None:
        """Queue the slot; frames sent in one turn of the loop leave as one write where their slots lie side by side."""
        self._side.send(slot, num_bytes)
        self._waiting.append((slot.sequence_number, num_bytes))
        if len(self._waiting) >= self._num_run_frames:
            # A whole write: the device moves it while the caller fills the next slots.
            self._flush()
        elif not self._is_flush_due:
            self._is_flush_due = True
            asyncio.get_running_loop().call_soon(self._flush_in_turn)

    def give_back(self, slot: Slot) -> None:
        """Return the lent slot unsent."""
        self._side.give_back(slot)

    def statistics(self) -> ChannelStatistics:
        """Frames and bytes sent, credits that came back."""
        return self._side.statistics()

    async def close(self) -> None:
        """End the channel; what was not written yet is dropped."""
        self._deadline.cancel()
        _release(self._connection, self._side)
        self._forget()

    def on_message(self, message: Message) -> str | None:
        """A credit: the first one says that the landing side is connected."""
        if message.kind != CREDIT:
            return f"{message} where a credit was due"
        if message.number < self._num_released:
            return f"credits went back from {self._num_released} to {message.number}"
        if message.number > self._num_posted:
            return f"credit for {message.number} frames, but only {self._num_posted} were sent"
        if not self._deadline.cancelled():
            self._deadline.cancel()
            self._connection.start_watching()
            self._side.connect()
        self._num_released = message.number
        return self._credit()

    def on_write(self, immediate: int, num_bytes: int) -> str | None:
        """Nobody has a key to write here."""
        return f"a write of {num_bytes} bytes with immediate {immediate} into the departure side"

    def on_written(self, num_writes: int) -> None:
        """The frames of these writes have left the ring."""
        num_frames = self._side.window.num_transmitted
        while self._num_frames_after_write and self._num_frames_after_write[0][0] <= num_writes:
            num_frames = self._num_frames_after_write.popleft()[1]
        self._side.window.transmit(num_frames)
        fault = self._credit()
        assert fault is None, f"a credit that was in order: {fault}"

    def on_turn(self) -> None:
        """Writes may have made room."""
        self._flush()

    def on_lost(self, reason: str) -> None:
        """The connection is over."""
        self._deadline.cancel()
        self._side.state.break_off(f"rdma departure: {reason}")

    def probe(self) -> bytes:
        """Shows life."""
        return Message(PROBE, 0).pack()

    def _credit(self) -> str | None:
        # A slot is lent again only when the device has let go of it too: until the acknowledgement it may have to send the bytes again.
        return self._side.credit(min(self._num_released, self._side.window.num_transmitted))

    def _flush_in_turn(self) -> None:
        self._is_flush_due = False
        self._flush()

    def _flush(self) -> None:
        max_out = self._limits.max_writes_in_flight
        while self._waiting and self._side.state.is_open and self._connection.num_writes_out < max_out:
            run = take_run(self._waiting, self._geometry, self._limits.max_run_bytes)
            self._num_writes += 1
            self._num_posted += run.num_frames
            self._num_frames_after_write.append((self._num_writes, self._num_posted))
            address, key = self._target
            self._connection.write(
                (run.offset, run.num_bytes),
                (address + run.offset, key),
                run.first % _IMMEDIATE_MODULUS,
                is_signalled=self._must_signal(),
            )

    def _must_signal(self) -> bool:
        """The last write of a turn always tells, so that no slot waits for a later one."""
        self._num_unsignalled += 1
        is_full = self._connection.num_writes_out + 1 >= self._limits.max_writes_in_flight
        must = not self._waiting or is_full or self._num_unsignalled >= self._limits.max_unsignalled_writes
        if must:
            self._num_unsignalled = 0
        return must


class RdmaLanding:
    """The receiving end: its ring is the one memory that a peer may write."""

    def __init__(
        self, device: Device, link: Link, geometry: RingGeometry, limits: Limits, forget: Callable[[], None]
    ) -> None:
        """Map and register the ring; the receives for all its slots are posted before anybody knows where it is."""
        self._geometry = geometry
        self._limits = limits
        self._forget = forget
        self._side = ReceiveSide(geometry)
        num_receives = geometry.num_slots + limits.num_message_receives
        plan = Plan(link, num_receives=num_receives, num_sends=0, may_be_written=True)
        self._connection = _connection(device, plan, self._side, self, limits)
        ring = self._connection.ring
        self._offer = Offer(geometry, self._connection.address, ring.address, ring.remote_key)
        self._is_establishing = self._is_connected = self._is_credit_due = False

    @property
    def offer(self) -> bytes:
        """Geometry, queue pair, and address and key of the ring."""
        return self._offer.pack()

    async def establish(self, answer: bytes) -> None:
        """Connect to the answering queue pair and wait for its acknowledgement of our first credit. Once."""
        self._side.state.check()
        assert not self._is_establishing, "a landing end is established once"
        self._is_establishing = True
        peer = unpack_answer(answer)
        if isinstance(peer, str):
            raise self._broken(f"establish: {peer}")
        try:
            self._connection.connect(peer)
            self._connection.message(self.probe())
            async with asyncio.timeout(self._limits.establish_s):
                await self._side.state.take(lambda: True if self._is_connected else None)
        except TimeoutError as error:
            raise self._broken(f"the departure side did not answer within {self._limits.establish_s:g} s") from error
        except (VerbsError, OSError) as error:
            raise self._broken(f"establish: {error}") from error
        except asyncio.CancelledError:
            self._broken("establish was cancelled")
            raise
        self._connection.start_watching()

    async def receive(self) -> Slot:
        """Wait for the next frame."""
        return await self._side.receive()

    def release(self, slot: Slot) -> None:
        """Give the slot back; credits of one turn of the loop leave as one message."""
        if self._side.release(slot) and self._is_connected and not self._is_credit_due:
            self._is_credit_due = True
            asyncio.get_running_loop().call_soon(self._send_credit)

    def statistics(self) -> ChannelStatistics:
        """Frames and bytes that arrived whole, credits given."""
        return self._side.statistics()

    async def close(self) -> None:
        """End the channel; when this returns no byte lands any more. `VerbsError` if that cannot be had: then the ring stays."""
        _release(self._connection, self._side)
        self._forget()

    def on_message(self, message: Message) -> str | None:
        """Life."""
        return None if message == Message(PROBE, 0) else f"{message} where a probe was due"

    def on_write(self, immediate: int, num_bytes: int) -> str | None:
        """One or more whole frames: all but the last fill their slots."""
        window = self._side.window
        if immediate != window.num_arrived % _IMMEDIATE_MODULUS:
            return f"frame {immediate} came where frame {window.num_arrived} was due"
        num_left = num_bytes
        while num_left or num_bytes == 0:
            num_frame_bytes = min(num_left, self._geometry.slot_bytes)
            fault = self._side.refusal(window.num_arrived, num_frame_bytes)
            if fault is not None:
                return fault
            self._side.arrive(num_frame_bytes)
            num_left -= num_frame_bytes
        return None

    def on_written(self, num_writes: int) -> None:
        """This end writes nothing."""
        raise AssertionError(f"{num_writes} writes of a landing end")

    def on_turn(self) -> None:
        """A message that was acknowledged connects us, and makes room for the credits that came due meanwhile."""
        if not self._is_connected and self._connection.can_message and self._is_establishing:
            self._is_connected = True
            self._side.state.wake()
        if self._is_credit_due:
            self._send_credit()

    def on_lost(self, reason: str) -> None:
        """The connection is over."""
        self._side.state.break_off(f"rdma landing: {reason}")

    def probe(self) -> bytes:
        """The credits once more: a total may be repeated."""
        return Message(CREDIT, self._side.window.num_released).pack()

    def _send_credit(self) -> None:
        if self._is_credit_due and self._connection.can_message:
            self._is_credit_due = False
            self._connection.message(self.probe())

    def _broken(self, reason: str) -> ChannelBroken | ChannelClosed:
        self._connection.lose(reason)
        error = self._side.state.error()
        assert isinstance(error, ChannelBroken | ChannelClosed), "an end that was just broken has a reason"
        return error


def _release(connection: Connection, side: SendSide | ReceiveSide) -> None:
    """End an end: whoever waits on it is told in any case, the ring is given back only once the device has let go of it."""
    try:
        connection.close()
    except VerbsError:
        side.state.close()
        raise
    side.close()


def _connection(
    device: Device, plan: Plan, side: SendSide | ReceiveSide, owner: RdmaDeparture | RdmaLanding, limits: Limits
) -> Connection:
    try:
        return Connection(device, plan, side.memory, owner, limits)
    except TransportRefused:
        side.close()
        raise
