"""The prefill side of its pairs: answers hellos, keeps departure ends, and notices when a decode server is gone.

Never: outlives the stream that is the pair; computes or judges a prompt.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from kvlease.handoff.limits import Limits as HandoffLimits
from kvlease.handoff.messages import AbortReason, Epoch, Incarnation, RejectReason
from kvlease.handoff.prefill_attempt import EndedHere
from kvlease.handoff.verdicts import aborted, rejected
from kvlease.handoff.wire import encode_rejected
from kvlease.peering.agreement import Party, disagreement, malformed
from kvlease.peering.errors import PairLost, PairRefused
from kvlease.peering.heartbeat import Beat, LifeSigns, show_life
from kvlease.peering.identity import draw_epoch
from kvlease.peering.limits import Limits
from kvlease.peering.status import PairReport
from kvlease.v1 import kvlease_pb2 as pb
from transport.contract import Departure, RingGeometry, Transport
from transport.errors import TransportError, TransportRefused

logger = logging.getLogger(__name__)

PairStream = AsyncIterator[pb.PairUp]
PairContext = grpc.aio.ServicerContext[pb.PairUp, pb.PairDown]


class Standing(Protocol):
    """Something that stands on a pair and must hear of its end."""

    def happen(self, happening: EndedHere) -> object:
        """Take the news; does not wait."""


class IncomingPair:
    """One living pair: a decode server, an epoch, a departure end."""

    def __init__(self, hello: pb.PairHello, departure: Departure, transport: str) -> None:
        """Living from now on, until its stream ends."""
        self.peer_address = hello.address
        self.incarnation = Incarnation(hello.incarnation)
        self.wire_block_size = hello.block_size
        self.epoch = draw_epoch()
        self.departure = departure
        self.standing: set[Standing] = set()
        self._transport = transport

    def report(self) -> PairReport:
        """For the status."""
        sent = self.departure.statistics()
        return PairReport(self.peer_address, self._transport, "ready", "", self.epoch, sent.num_frames, sent.num_bytes)

    def end(self, detail: str) -> None:
        """Tell everything that stands on it."""
        cause = aborted(AbortReason.PEER_LOST, f"decode {self.peer_address}: {detail}")
        for standing in tuple(self.standing):
            standing.happen(EndedHere(cause))


class IncomingPairs:
    """All living pairs of a prefill server. `depart` fills a pair's departure end until cancelled."""

    def __init__(
        self,
        party: Party,
        sealed_bytes: Callable[[int], int],
        transport: Transport,
        beat: Callable[[], Beat],
        depart: Callable[[IncomingPair], Awaitable[None]],
    ) -> None:
        """`sealed_bytes` gives the size of a sealed block of so many tokens."""
        self._party, self._sealed_bytes, self._transport, self._beat, self._depart = (
            party,
            sealed_bytes,
            transport,
            beat,
            depart,
        )
        self._pairs: dict[Incarnation, IncomingPair] = {}
        self._num_living = 0  # a decode process may pair anew before its old stream is known to be dead
        self._limits, self._handoff = Limits(), HandoffLimits()

    def find(self, incarnation: Incarnation) -> IncomingPair | None:
        """The living pair with this decode process."""
        return self._pairs.get(incarnation)

    def reports(self) -> list[PairReport]:
        """For the status."""
        return [pair.report() for pair in self._pairs.values()]

    async def serve(self, stream: PairStream, context: PairContext) -> None:
        """The life of one pair, which is the life of its stream."""
        try:
            await self._serve(stream, context)
        except* PairRefused as group:
            message = str(group.exceptions[0])
            logger.warning("pair.refused", extra={"detail": message})
            refusal = encode_rejected(rejected(RejectReason.MISMATCH, message))
            await context.write(pb.PairDown(refused=refusal))
        except* (PairLost, TransportError, TimeoutError) as group:
            logger.warning("pair.lost", extra={"detail": str(group.exceptions[0])})

    async def _serve(self, stream: PairStream, context: PairContext) -> None:
        async with asyncio.timeout(self._limits.pair_s):
            hello = await _hello(stream)
        geometry = self._check(hello)
        self._num_living += 1
        try:
            await self._live(hello, geometry, stream, context)
        finally:
            self._num_living -= 1

    async def _live(
        self, hello: pb.PairHello, geometry: RingGeometry, stream: PairStream, context: PairContext
    ) -> None:
        try:
            departure, answer = await self._transport.open_departure(geometry, hello.offer)
        except TransportRefused as error:
            raise PairRefused(str(error)) from error
        pair = IncomingPair(hello, departure, self._transport.name)
        detail = "the decode server ended the pair"
        try:
            await context.write(pb.PairDown(answer=self._answer(pair, answer, geometry)))
            await departure.ready()
            self._pairs[pair.incarnation] = pair
            logger.info("pair.ready", extra={"peer": pair.peer_address, "transport": self._transport.name})
            await self._watch(pair, stream, context)
        except* (PairLost, TransportError) as group:
            detail = str(group.exceptions[0])
            raise
        finally:
            if self._pairs.get(pair.incarnation) is pair:
                del self._pairs[pair.incarnation]
            try:
                pair.end(detail)
            finally:
                await departure.close()

    def _check(self, hello: pb.PairHello) -> RingGeometry:
        wrong = malformed(hello, self._party, self._limits)
        if wrong is not None:
            raise PairRefused(wrong)
        sealed_bytes = self._sealed_bytes(hello.block_size)
        wrong = disagreement(hello, self._party, sealed_bytes)
        if wrong is not None:
            raise PairRefused(wrong)
        if self._num_living >= self._limits.max_pairs:
            raise PairRefused(f"{self._num_living} decode servers are paired already")
        return RingGeometry(sealed_bytes, hello.ring_bytes // sealed_bytes)

    def _answer(self, pair: IncomingPair, answer: bytes, geometry: RingGeometry) -> pb.PairAnswer:
        party = self._party
        return pb.PairAnswer(
            incarnation=party.incarnation,
            pool_tokens=party.pool_tokens,
            max_model_len=party.capacity,
            epoch=pair.epoch,
            answer=answer,
            block_size=pair.wire_block_size,
            num_slots=geometry.num_slots,
            slot_bytes=geometry.slot_bytes,
        )

    async def _watch(self, pair: IncomingPair, stream: PairStream, context: PairContext) -> None:
        async def send(beat: Beat) -> None:
            await context.write(pb.PairDown(heartbeat=pb.Heartbeat(pulse=beat.pulse, busy=beat.is_busy)))

        async def receive() -> Beat:
            try:
                message = await anext(stream, None)
            except DecodeError as error:
                raise PairLost(f"a message of the decode server cannot be read: {error}") from error
            if message is None:
                raise PairLost("the decode server ended the pair")
            if message.WhichOneof("message") != "heartbeat":
                raise PairLost("the decode server sent something else than a heartbeat")
            return Beat(message.heartbeat.pulse, message.heartbeat.busy)

        async with asyncio.TaskGroup() as group:
            group.create_task(show_life(self._beat, send, self._handoff))
            group.create_task(LifeSigns().watch(receive, self._handoff))
            group.create_task(_run(self._depart(pair)))


async def _run(work: Awaitable[None]) -> None:
    await work


async def _hello(stream: PairStream) -> pb.PairHello:
    try:
        message = await anext(stream, None)
    except DecodeError as error:
        raise PairRefused(f"the first message of the pair cannot be read: {error}") from error
    if message is None or message.WhichOneof("message") != "hello":
        raise PairRefused("the first message of a pair is its hello")
    return message.hello


def epoch_of(pair: IncomingPair | None) -> Epoch | None:
    """The living epoch, for the verdict."""
    return None if pair is None else pair.epoch
