"""The decode side of a pair: makes it, keeps it, and makes it anew under a new epoch when it is lost.

Never: judges a block or an attempt; it tells the attempts that stand on it when it ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import AsyncExitStack
from typing import Protocol

import grpc
import grpc.aio

from kvlease.handoff.decode_attempt import Ended
from kvlease.handoff.limits import Limits as HandoffLimits
from kvlease.handoff.messages import AbortReason, Epoch
from kvlease.handoff.verdicts import aborted
from kvlease.peering.agreement import Party, hello_of, unfit
from kvlease.peering.attempt_stream import AttemptStream
from kvlease.peering.call_writer import CallWriter
from kvlease.peering.channels import credentials, open_channel
from kvlease.peering.errors import PairLost, PairRefused
from kvlease.peering.heartbeat import Beat, LifeSigns, show_life
from kvlease.peering.hosting import ended
from kvlease.peering.limits import Limits
from kvlease.peering.status import PairReport
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc as rpc
from transport.contract import Landing, Transport
from transport.errors import TransportError

logger = logging.getLogger(__name__)


class Standing(Protocol):
    """Something that stands on a pair and must hear of its end."""

    def post(self, happening: Ended) -> None:
        """Take the news; does not wait."""


class OutgoingPair:
    """One prefill server as this decode server sees it. `land` takes the landing end and empties it until cancelled."""

    def __init__(
        self,
        peer_address: str,
        party: Party,
        secret: str,
        transport: Transport,
        beat: Callable[[], Beat],
        land: Callable[[OutgoingPair, Landing], Awaitable[None]],
    ) -> None:
        """Nothing is opened before `keep` runs."""
        self.peer_address = peer_address
        self.state = "connecting"
        self.detail = ""
        self.epoch = Epoch(0)
        self.peer_capacity = 0
        self.life = LifeSigns()
        self.standing: set[Standing] = set()
        self._party, self._secret, self._transport, self._beat, self._land = party, secret, transport, beat, land
        self._limits, self._handoff = Limits(), HandoffLimits()
        self._landing: Landing | None = None
        self._channel: grpc.aio.Channel | None = None

    @property
    def is_ready(self) -> bool:
        """Whether attempts may be opened."""
        return self._channel is not None

    @property
    def progress(self) -> tuple[int, int]:
        """Changes while prefill computes or sends anything: its pulse, and the frames that arrived."""
        return self.life.pulse, self._landing.statistics().num_frames if self._landing is not None else 0

    def report(self) -> PairReport:
        """For the status."""
        seen = self._landing.statistics() if self._landing is not None else None
        return PairReport(
            self.peer_address,
            self._transport.name,
            self.state,
            self.detail,
            self.epoch,
            seen.num_frames if seen else 0,
            seen.num_bytes if seen else 0,
        )

    def open_attempt(self) -> AttemptStream:
        """A stream for one attempt. Only while the pair is ready."""
        assert self._channel is not None, "attempts are opened on a living pair"
        return AttemptStream(rpc.PrefillStub(self._channel).Attempt(metadata=credentials(self._secret)))

    async def keep(self) -> None:
        """Make the pair, again and again, until cancelled."""
        pause = self._limits.backoff_s
        while True:
            began_s = time.monotonic()
            try:
                await _apart(self._live())
            except* PairRefused as group:
                self._down("refused", _first_cause(group))
                pause = self._limits.refused_s
            except* (PairLost, TransportError, grpc.aio.AioRpcError, TimeoutError, OSError) as group:
                # A pair that breaks as soon as it is made is no success: its cause is still there.
                if self.state == "ready" and time.monotonic() - began_s > self._limits.max_backoff_s:
                    pause = self._limits.backoff_s
                self._down("connecting", _first_cause(group))
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._limits.max_backoff_s)

    def _down(self, state: str, detail: str) -> None:
        if (state, detail) != (self.state, self.detail):
            logger.warning("pair.down", extra={"peer": self.peer_address, "state": state, "detail": detail})
        self.state, self.detail, self.epoch = state, detail, Epoch(0)
        end = Ended(aborted(AbortReason.PEER_LOST, f"prefill {self.peer_address}: {detail}"))
        for standing in tuple(self.standing):
            standing.post(end)

    async def _live(self) -> None:
        party = self._party
        async with AsyncExitStack() as stack:
            channel = open_channel(self.peer_address, party.context_length, self._limits)
            stack.push_async_callback(channel.close)
            landing = await self._transport.open_landing(party.geometry)
            stack.push_async_callback(landing.close)
            stack.callback(self._let_go)
            call = rpc.PrefillStub(channel).Pair(metadata=credentials(self._secret))
            writer = CallWriter[pb.PairUp](call)
            async with asyncio.timeout(self._limits.pair_s):
                await writer.write(pb.PairUp(hello=hello_of(party, landing.offer)))
                answer = _answer(await call.read(), party)
                await landing.establish(answer.answer)
            self._up(answer, channel, landing)
            await self._watch(call, writer, landing)

    def _let_go(self) -> None:
        self._channel, self._landing = None, None

    def _up(self, answer: pb.PairAnswer, channel: grpc.aio.Channel, landing: Landing) -> None:
        self._channel, self._landing = channel, landing
        self.epoch = Epoch(answer.epoch)
        self.peer_capacity = answer.max_model_len
        self.life = LifeSigns()
        self.state, self.detail = "ready", ""
        logger.info("pair.ready", extra={"peer": self.peer_address, "transport": self._transport.name})

    async def _watch(
        self, call: grpc.aio.StreamStreamCall[pb.PairUp, pb.PairDown], writer: CallWriter[pb.PairUp], landing: Landing
    ) -> None:
        async def send(beat: Beat) -> None:
            await writer.write(pb.PairUp(heartbeat=pb.Heartbeat(pulse=beat.pulse, busy=beat.is_busy)))

        async def receive() -> Beat:
            message = await call.read()
            if not isinstance(message, pb.PairDown):
                raise PairLost("the prefill server ended the pair")
            if message.WhichOneof("message") != "heartbeat":
                raise PairLost("the prefill server sent something else than a heartbeat")
            return Beat(message.heartbeat.pulse, message.heartbeat.busy)

        async with asyncio.TaskGroup() as group:
            group.create_task(show_life(self._beat, send, self._handoff))
            group.create_task(self.life.watch(receive, self._handoff))
            group.create_task(_run(self._land(self, landing)))


async def _apart(work: Coroutine[object, object, None]) -> None:
    """In a task of its own: a task group that fails while its task is cancelled tells of its failure alone, and the cancel is lost."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait([task])
    except asyncio.CancelledError:
        await ended(task)
        if not task.cancelled():
            task.exception()  # it is of no interest any more
        raise
    task.result()


async def _run(work: Awaitable[None]) -> None:
    await work


def _answer(message: object, own: Party) -> pb.PairAnswer:
    if not isinstance(message, pb.PairDown):
        raise PairLost("the prefill server ended the pair before it answered")
    if message.WhichOneof("message") == "refused":
        raise PairRefused(message.refused.message)
    if message.WhichOneof("message") != "answer":
        raise PairRefused("prefill answered the hello with something else than an answer")
    wrong = unfit(message.answer, own)
    if wrong is not None:
        raise PairRefused(wrong)
    return message.answer


def _first_cause(group: BaseExceptionGroup[BaseException]) -> str:
    cause: BaseException = group
    while isinstance(cause, BaseExceptionGroup):
        cause = cause.exceptions[0]
    if isinstance(cause, grpc.aio.AioRpcError):
        return f"{cause.code().name}: {cause.details()}"
    return str(cause) or type(cause).__name__
