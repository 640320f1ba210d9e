"""One transfer measurement: every line of it in every round, side by side, so that what disturbs one disturbs all.

For each block size and round: copy, plain stream, then each channel in each order. A channel's ratio is taken to the plain stream of
its own round.

Never: reports a transfer whose blocks did not all arrive.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

from kvlease.bench.figures import Figure, Notes
from kvlease.bench.limits import Limits
from kvlease.bench.transfer.partner import Partner, partner
from kvlease.bench.transfer.plan import ORDERS, BlockShape, TransferPlan, cpu_s, order_of
from kvlease.bench.transfer.sending import PlainSource, Source, SourceMaker, random_pool
from kvlease.bench.transfer.streams import StreamEnd, copy_s
from kvlease.bench.transfer.transports import MEMORY, measured_transport
from transport.contract import Departure
from transport.errors import TransportError

BARE, VERIFIED = "bare", "verified"
NUM_BUSY_STREAMS = 8
_GIGA = 1e9
_MICRO = 1e-6


@dataclass(frozen=True, slots=True)
class _Link:
    """A connected channel, by the name that both sides know it by."""

    name: str
    departure: Departure
    source: Source

    @property
    def is_idle(self) -> bool:
        """Whether every slot that was sent has been given back."""
        seen = self.departure.statistics()
        return seen.num_credits == seen.num_frames


async def measure_transfer(plan: TransferPlan, limits: Limits, advance: Callable[[], None]) -> list[Figure]:
    """All figures of the plan; `advance` is called once a round of a block size. Raises `BenchFailed`, `TransportError`."""
    notes = Notes()
    async with AsyncExitStack() as stack:
        other = await stack.enter_async_context(partner(limits, is_far=plan.transport != MEMORY))
        stream = None if plan.transport == MEMORY else await _connect_stream(other, limits)
        if stream is not None:
            stack.callback(stream.close)
        for is_busy in (False, True) if plan.busy_model else (False,):
            measurement = _Measurement(plan, limits, other, stream, notes)
            async with measurement.engine(is_busy):
                for block_bytes in plan.block_bytes:
                    await measurement.measure_size(block_bytes, advance)
    return notes.figures()


async def _connect_stream(other: Partner, limits: Limits) -> StreamEnd:
    port = (await other.ask("listen"))["port"]
    assert isinstance(port, int), port
    sock = socket.create_connection(("127.0.0.1", port), limits.answer_s)
    stream = StreamEnd(sock, limits)
    await other.ask("accept")
    return stream


class _Measurement:
    """The sending process's part, with or without an engine beside the receiver."""

    def __init__(
        self, plan: TransferPlan, limits: Limits, other: Partner, stream: StreamEnd | None, notes: Notes
    ) -> None:
        self._plan, self._limits, self._other, self._stream, self._notes = plan, limits, other, stream, notes
        self._pool, self._second_pool = random_pool(plan.total_bytes), random_pool(plan.total_bytes)
        self._labels: dict[str, str] = {}

    @asynccontextmanager
    async def engine(self, is_busy: bool) -> AsyncIterator[None]:
        """Have the receiving process decode all the while; note its steps without and beside transfers."""
        if not is_busy:
            yield
            return
        self._labels = {"engine": f"{NUM_BUSY_STREAMS} streams"}
        for name in ("decode step alone", "decode step beside"):
            await self._other.ask("load", model=self._plan.busy_model, num_streams=NUM_BUSY_STREAMS)
            try:
                if name.endswith("alone"):
                    await asyncio.sleep(self._limits.engine_alone_s)
                else:
                    yield
            finally:
                steps = (await self._other.ask("unload"))["steps_s"]
                assert isinstance(steps, list), steps
                for step_s in steps:
                    self._notes.add(name, "ms", step_s * 1e3, self._labels)

    async def measure_size(self, block_bytes: int, advance: Callable[[], None]) -> None:
        """Every line of one block size."""
        shape = self._plan.shape(block_bytes)
        async with AsyncExitStack() as stack:
            # Sealed first: loading torch stops an event loop for longer than a silent peer is believed to live.
            kinds = (True, False) if self._plan.is_verified else (False,)
            links = [await stack.enter_async_context(self._link(shape, is_sealed=kind)) for kind in kinds]
            for number in range(self._plan.rounds + 1):  # the first one warms up
                await self._round(shape, links, number)
                advance()
            for link in links:
                await self._latencies(shape, link)
        if self._stream is not None:
            await self._stream_latencies(shape, self._stream)

    @asynccontextmanager
    async def _link(self, shape: BlockShape, *, is_sealed: bool) -> AsyncIterator[_Link]:
        plan, make_source = self._plan, _sealed_source_maker() if is_sealed else self._plain_source
        name = VERIFIED if is_sealed else BARE
        geometry = plan.geometry(shape.num_bytes, is_sealed=is_sealed)
        end = {"transport": plan.transport, "secret": secrets.token_hex(16), "host": plan.host}
        content = {"block_bytes": shape.num_bytes, "num_layers": shape.num_layers, "sealed": is_sealed}
        sizes = {"slot_bytes": geometry.slot_bytes, "num_slots": geometry.num_slots}
        num_blocks = plan.num_blocks(shape.num_bytes)
        source = make_source(shape, num_blocks)
        async with AsyncExitStack() as stack:
            opened = await self._other.ask("open", channel=name, num_blocks=num_blocks, **end, **content, **sizes)
            stack.push_async_callback(self._other.ask, "shut", channel=name)
            transport = measured_transport(*end.values())
            stack.push_async_callback(transport.close)
            departure, answer = await transport.open_departure(geometry, bytes.fromhex(str(opened["offer"])))
            stack.push_async_callback(departure.close)
            await self._other.ask("establish", channel=name, answer=answer.hex())
            await departure.ready()
            source.start(departure)
            stack.push_async_callback(source.close)
            yield _Link(name, departure, source)

    def _plain_source(self, shape: BlockShape, _num_blocks: int) -> Source:
        return PlainSource(shape, self._pool)

    async def _round(self, shape: BlockShape, links: list[_Link], number: int) -> None:
        seen: list[tuple[str, float, float, dict[str, str]]] = []
        num_blocks = self._plan.num_blocks(shape.num_bytes)
        num_bytes = num_blocks * shape.num_bytes
        for order in ORDERS:
            places = order_of(num_blocks, order, number)
            seconds = copy_s(self._pool, self._second_pool, shape.num_bytes, places)
            seen.append(("copy", seconds, 0.0, {"order": order}))
        stream_s = 0.0
        if self._stream is not None:
            stream_s, cpu = await self._stream_once(self._stream, num_bytes)
            seen.append(("stream", stream_s, cpu, {}))
        for link in links:
            for order in ORDERS:
                seconds, cpu = await self._transfer(link, num_blocks, order, number)
                seen.append((link.name, seconds, cpu, {"order": order}))
        if number:
            for name, seconds, cpu, labels in seen:
                self._note(name, shape, labels, num_bytes, (seconds, cpu, stream_s))

    def _note(
        self, name: str, shape: BlockShape, labels: dict[str, str], num_bytes: int, spent: tuple[float, float, float]
    ) -> None:
        seconds, cpu, stream_s = spent
        labels = {"block": _size(shape.num_bytes), **labels, **self._labels}
        self._notes.add(name, "GB/s", num_bytes / seconds / _GIGA, labels)
        if cpu:
            self._notes.add(f"{name} cpu", "s/GB", cpu / num_bytes * _GIGA, labels)
        if stream_s and name in (BARE, VERIFIED):
            self._notes.add(f"{name} to stream", "ratio", stream_s / seconds, labels)

    async def _stream_once(self, stream: StreamEnd, num_bytes: int) -> tuple[float, float]:
        draining = asyncio.create_task(self._other.ask("drain", num_bytes=num_bytes, times=1))
        await asyncio.sleep(self._limits.pace_s)  # the order is out, and the other side waits in recv
        cpu = cpu_s()
        started = stream.send(num_bytes)
        cpu = cpu_s() - cpu
        answer = await draining
        return _number(answer, "finished_at") - started, cpu + _number(answer, "cpu_s")

    async def _transfer(self, link: _Link, num_blocks: int, order: str, seed: int) -> tuple[float, float]:
        lease = await link.source.prepare(num_blocks, order, seed)
        await self._other.ask("expect", channel=link.name, num_blocks=num_blocks, order=order, seed=seed, lease=lease)
        cpu, started = cpu_s(), time.monotonic()
        await self._send(link, num_blocks)
        answer = await self._other.ask("wait", channel=link.name)
        own = 0.0 if self._plan.transport == MEMORY else cpu_s() - cpu  # in one process the other's is ours
        return _number(answer, "finished_at") - started, own + _number(answer, "cpu_s")

    async def _send(self, link: _Link, num_blocks: int) -> None:
        try:
            await link.source.send(num_blocks)
        except TransportError:
            await self._other.ask("wait", channel=link.name)  # which end broke first knows why, and raises
            raise

    async def _latencies(self, shape: BlockShape, link: _Link) -> None:
        count = self._plan.num_single(shape.num_bytes)
        if not count:
            return
        lease = await link.source.prepare(count, ORDERS[0], 0)
        await self._other.ask("expect", channel=link.name, num_blocks=count, order=ORDERS[0], seed=0, lease=lease)
        starts = []
        for _ in range(count):
            await asyncio.sleep(self._limits.pace_s)
            while not link.is_idle:  # noqa: ASYNC110  a channel has no event for what is asked here
                await asyncio.sleep(self._limits.pace_s)
            starts.append(time.monotonic())
            await self._send(link, 1)
        answer = await self._other.ask("wait", channel=link.name, each=True)
        self._note_latencies(link.name, shape, starts, answer["arrivals"])

    async def _stream_latencies(self, shape: BlockShape, stream: StreamEnd) -> None:
        count = self._plan.num_single(shape.num_bytes)
        if not count:
            return
        order = {"num_bytes": shape.num_bytes, "times": count, "each": True}
        draining = asyncio.create_task(self._other.ask("drain", **order))
        starts = []
        for _ in range(count):
            await asyncio.sleep(self._limits.pace_s)
            starts.append(stream.send(shape.num_bytes))
        self._note_latencies("stream", shape, starts, (await draining)["arrivals"])

    def _note_latencies(self, name: str, shape: BlockShape, starts: list[float], arrivals: object) -> None:
        assert isinstance(arrivals, list), arrivals
        labels = {"block": _size(shape.num_bytes), **self._labels}
        for start, arrival in zip(starts, arrivals, strict=True):
            self._notes.add(f"{name} one block", "us", (arrival - start) / _MICRO, labels)


def _sealed_source_maker() -> SourceMaker:
    from kvlease.bench.transfer.sealed_source import SealedSource  # noqa: PLC0415  loads torch

    return SealedSource


def _number(answer: dict[str, object], name: str) -> float:
    value = answer[name]
    assert isinstance(value, float), f"{name} is {value!r}"
    return value


def _size(num_bytes: int) -> str:
    return f"{num_bytes >> 10} KiB" if num_bytes % 1024 == 0 else f"{num_bytes} B"
