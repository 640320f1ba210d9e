"""One reliable connection in the event loop: its queue pair, its registered ring, the messages of both ends, and that the peer lives.

    memory    ring (registered once; remote-writable on the landing side only), messages (never remote-writable)
    making    domain, queues, regions, queue pair in INIT, receives posted   -> `address`, which the peer needs
              INIT -> RTR -> RTS with the peer's address                     -> `connect`
    ending    queue pair to ERR, destroyed, ring deregistered, then the rest -> `close`: not a byte lands after it

The order of the ending is the one that left no late byte on soft-RoCE in thousands of races; a write that was on its way is dropped by the device,
since the queue pair that it names is gone. All of it happens in callbacks of the loop.

Never: knows a frame from a credit.
"""

from __future__ import annotations

import asyncio
import mmap
import secrets
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from transport.errors import TransportRefused, VerbsError
from transport.life import TICKS_PER_PROBE, Watch, max_still_ticks, tick_s
from transport.limits import Limits
from transport.rdma import verbs
from transport.rdma.devices import Link
from transport.rdma.wire import MESSAGE_BYTES, Message, QueuePairAddress, unpack_message

if TYPE_CHECKING:
    from pyverbs.cq import WC

_MAX_PSN = 1 << 24
#: Marks the completion of a message among those of writes, which are numbered from 1.
_MESSAGE_ID = 1 << 63
_COMPLETIONS_PER_POLL = 32

Made = TypeVar("Made")


class Owner(Protocol):
    """The end of a channel that uses the connection. A text that it returns says how the peer broke the protocol."""

    def on_message(self, message: Message) -> str | None:
        """The peer sent this."""

    def on_write(self, immediate: int, num_bytes: int) -> str | None:
        """The peer's write with this immediate has wholly landed in the ring."""

    def on_written(self, num_writes: int) -> None:
        """So many of our writes (a total) are in the peer's ring and acknowledged."""

    def on_turn(self) -> None:
        """The completions of this turn were handled: there may be room for more work."""

    def on_lost(self, reason: str) -> None:
        """The connection is over and already closed."""

    def probe(self) -> bytes:
        """A message that shows life."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a connection is made of."""

    link: Link
    num_receives: int
    num_sends: int
    may_be_written: bool


class Connection:
    """A queue pair and what it touches, from INIT until `close` or until it is lost."""

    def __init__(self, device: verbs.Device, plan: Plan, ring: memoryview, owner: Owner, limits: Limits) -> None:
        """Make everything that needs no peer; `TransportRefused` names the call that failed. Nothing of a failed attempt stays."""
        self._plan = plan
        self._owner = owner
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._first_psn = secrets.randbelow(_MAX_PSN)
        # Buffer 0 is what we send, the others are where messages arrive.
        self._messages = memoryview(mmap.mmap(-1, (plan.num_receives + 1) * MESSAGE_BYTES))
        self._watch_in, self._watch_out = Watch(), Watch()
        self._num_ticks = 0
        self._ticker: asyncio.TimerHandle | None = None
        self._is_message_out = False
        self._num_writes = self._num_writes_done = 0
        self._is_open = True
        self._not_released: VerbsError | None = None
        with ExitStack() as stack:
            try:
                self._make(stack, device, ring)
            except (VerbsError, OSError) as error:
                raise TransportRefused(f"{plan.link}: {error}{_advice(error)}") from error
            self._undo = stack.pop_all()

    def _make(self, stack: ExitStack, device: verbs.Device, ring: memoryview) -> None:
        plan = self._plan
        domain = _kept(stack, verbs.ProtectionDomain(device))
        num_completions = plan.num_sends + plan.num_receives + 1
        self._completions = _kept(stack, verbs.CompletionQueue(device, num_completions))
        self._message_region = _kept(stack, verbs.Region(domain, self._messages, is_remote_writable=False))
        self.ring = _kept(stack, verbs.Region(domain, ring, is_remote_writable=plan.may_be_written))
        self._pair = verbs.QueuePair(domain, self._completions, plan.num_sends + 1, plan.num_receives)
        stack.callback(self._end_pair)
        self._pair.to_init(plan.link, may_be_written=plan.may_be_written)
        address, key = self._message_region.address, self._message_region.local_key
        self._send_work = verbs.message_work(_MESSAGE_ID, address, MESSAGE_BYTES, key)
        # A receive is posted again and again: made once, since this costs more than posting it.
        self._receive_works = [
            verbs.receive_work(index, address + index * MESSAGE_BYTES, MESSAGE_BYTES, key)
            for index in range(1, plan.num_receives + 1)
        ]
        for work in self._receive_works:
            self._pair.post_receive(work)

    @property
    def address(self) -> QueuePairAddress:
        """What the peer must be told."""
        link = self._plan.link
        return QueuePairAddress(
            self._pair.number, self._first_psn, link.lid, link.mtu, link.gid.gid if link.gid else None
        )

    @property
    def num_writes_out(self) -> int:
        """Writes that are not known to be complete."""
        return self._num_writes - self._num_writes_done

    @property
    def can_message(self) -> bool:
        """Is the one message buffer free?"""
        return self._is_open and not self._is_message_out

    def connect(self, peer: QueuePairAddress) -> None:
        """Join with the peer's queue pair and listen to it; `VerbsError` if it cannot be reached."""
        self._pair.to_ready_to_receive(self._plan.link, peer)
        self._pair.to_ready_to_send(self._first_psn)
        self._loop.add_reader(self._completions.descriptor, self._on_event)

    def start_watching(self) -> None:
        """From now on silence of the peer is its death, and we show our own life. Nothing happens at one that is over."""
        if not self._is_open:
            return
        self._watch_in.reset()
        self._ticker = self._loop.call_later(tick_s(self._limits), self._tick)

    def write(self, source: tuple[int, int], target: tuple[int, int], immediate: int, *, is_signalled: bool) -> None:
        """Write (offset, num_bytes) of our ring to the peer's (address, key). A failure ends the connection."""
        offset, num_bytes = source
        ours = (self.ring.address + offset, num_bytes, self.ring.local_key)
        self._num_writes += 1
        work = verbs.write_work(self._num_writes, ours, target, immediate, is_signalled=is_signalled)
        self._try(lambda: self._pair.post_send(work))

    def message(self, message: bytes) -> None:
        """Send a message; only while `can_message`. A failure ends the connection."""
        assert self.can_message, "one message at a time"
        self._messages[:MESSAGE_BYTES] = message
        self._is_message_out = True
        self._try(lambda: self._pair.post_send(self._send_work))

    def close(self) -> None:
        """End everything; when this returns no byte lands any more, and the ring's memory is nobody's but its owner's. Idempotent.

        `VerbsError` if the device does not let go, now and at each further call: then the ring must not be given back.
        """
        if not self._is_open:
            if self._not_released is not None:
                raise self._not_released
            return
        self._is_open = False
        if self._ticker is not None:
            self._ticker.cancel()
        self._loop.remove_reader(self._completions.descriptor)
        try:
            self._undo.close()
        except VerbsError as error:
            self._not_released = error
            raise

    def _end_pair(self) -> None:
        with suppress(
            VerbsError
        ):  # one that was never set up, or of a device that is gone: what counts is that it is destroyed
            self._pair.to_error()
        self._pair.close()

    def _on_event(self) -> None:
        if self._try(self._completions.take_event):
            self._drain()

    def _drain(self) -> None:
        """Handle what is there; the descriptor tells only of what comes after the queue was seen empty."""
        num_left = self._limits.max_completions_per_turn
        while self._is_open:
            if num_left <= 0:
                self._loop.call_soon(self._drain)
                break
            completions = self._try(lambda: self._completions.poll(_COMPLETIONS_PER_POLL))
            if not completions:
                break
            num_left -= len(completions)
            for completion in completions:
                fault = self._handle(completion)
                if fault is not None:
                    self.lose(fault)
                    return
        self._owner.on_turn()

    def _handle(self, completion: WC) -> str | None:
        status, opcode, work_id = completion.status, completion.opcode, completion.wr_id
        if status != verbs.SUCCESS:
            return f"the device reports {verbs.status_name(int(status))}"
        if opcode == verbs.RECEIVED_WRITE:
            fault = self._owner.on_write(completion.imm_data, completion.byte_len)
        elif opcode == verbs.RECEIVED_MESSAGE:
            fault = self._take_message(work_id, completion.byte_len)
        else:
            self._on_sent(work_id)
            return None
        self._watch_in.num_moved += 1
        # Posted again before the credit for this frame can leave, so a write with a credit always finds a receive.
        self._try(lambda: self._pair.post_receive(self._receive_works[work_id - 1]))
        return None if fault is None else f"the peer broke the protocol: {fault}"

    def _take_message(self, index: int, num_bytes: int) -> str | None:
        if num_bytes != MESSAGE_BYTES:
            return f"a message of {num_bytes} bytes"
        start = index * MESSAGE_BYTES
        return self._owner.on_message(unpack_message(self._messages[start : start + MESSAGE_BYTES]))

    def _on_sent(self, work_id: int) -> None:
        self._watch_out.num_moved += 1
        if work_id == _MESSAGE_ID:
            self._is_message_out = False
            return
        self._num_writes_done = work_id
        self._owner.on_written(work_id)

    def _tick(self) -> None:
        self._ticker = self._loop.call_later(tick_s(self._limits), self._tick)
        self._num_ticks += 1
        max_ticks = max_still_ticks(self._limits)
        silence_s = max_ticks * tick_s(self._limits)
        if self._watch_in.still_for() >= max_ticks:
            self.lose(f"nothing came from the peer for {silence_s:g} s")
        elif not self.num_writes_out and not self._is_message_out:
            self._watch_out.reset()
        elif self._watch_out.still_for() >= max_ticks:
            self.lose(f"the peer has acknowledged nothing for {silence_s:g} s")
        if self._num_ticks % TICKS_PER_PROBE == 0 and self.can_message:
            self.message(self._owner.probe())

    def _try(self, call: Callable[[], Made]) -> Made | None:
        """Do it; a failed call ends the connection and gives `None`."""
        if not self._is_open:
            return None
        try:
            return call()
        except VerbsError as error:
            self.lose(str(error))
            return None

    def lose(self, reason: str) -> None:
        """End everything and tell the owner why, whatever the device says to it. Harmless once it is closed."""
        if not self._is_open:
            return
        try:
            self.close()
        except VerbsError as error:
            reason = f"{reason}; and then {error}"
        self._owner.on_lost(reason)


class _Closable(Protocol):
    def close(self) -> None: ...


Kept = TypeVar("Kept", bound=_Closable)


def _kept(stack: ExitStack, made: Kept) -> Kept:
    stack.callback(made.close)
    return made


def _advice(error: Exception) -> str:
    if "ibv_reg_mr" in str(error):
        return "; raise the limit of locked memory (ulimit -l, or LimitMEMLOCK=infinity) or lower --ring-bytes"
    return ""
