"""What agreeing costs: from a proposal to its verdict, to ready, to the grant, to the last verified block; and what a refusal costs.

    this process                        another process                a third process
    a decode server's parts  ◀──gRPC──▶  `kvlease prefill`   ◀──gRPC──  `kvlease decode`, whose door refuses

The attempts are the shipped ones; what is added is a stream that notes when each message went by.

Never: speaks the protocol itself.
"""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from decode_server.app import RunningDecode
from decode_server.app import serving as serving_decode
from decode_server.attempts import Arrived, AttemptRun
from decode_server.config import DecodeConfig
from decode_server.peers import Peer
from gateway.rpc import GrpcDecodeClient
from kvlease.bench.errors import BenchFailed
from kvlease.bench.figures import Figure
from kvlease.bench.limits import Limits
from kvlease.bench.servers import server
from kvlease.engine.hosting import load_engine
from kvlease.engine.runner import ModelRunner
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.messages import (
    Admitted,
    AttemptDown,
    AttemptUp,
    GenerationRequest,
    Grant,
    Incarnation,
    Proposal,
    Ready,
    Rejected,
    RequestId,
    TenantId,
)
from kvlease.models.tiny import make_tiny_model
from kvlease.peering.attempt_stream import AttemptStream
from kvlease.peering.outgoing import OutgoingPair
from kvlease.peering.transports import TransportChoice, choose_transport
from kvlease.sampling.params import SamplingParams

_CONTEXT = 4096
_PREFILL_BLOCKS, _DECODE_BLOCKS, _BLOCK_SIZE = 64, 128, 16
_MICRO = 1e-6
_STAGES = ("verdict", "ready", "grant", "handoff", "arrived", "rejected by prefill", "rejected at the door")


@dataclass(frozen=True, slots=True)
class HandoffPlan:
    """`prompt_tokens` in chunks of one block, so that Ready does not wait for a computation."""

    transport: str = "tcp"
    num_requests: int = 300
    prompt_tokens: int = 64

    def __post_init__(self) -> None:
        """Refuse what has no handoff."""
        if self.num_requests < 1 or not _BLOCK_SIZE < self.prompt_tokens < _PREFILL_BLOCKS * _BLOCK_SIZE:
            raise ValueError(
                f"at least one request of {_BLOCK_SIZE + 1} to {_PREFILL_BLOCKS * _BLOCK_SIZE - 1} prompt tokens, got {self}"
            )


class WatchedStream:
    """An attempt's stream that notes when the first message of each kind went by (s, monotonic)."""

    def __init__(self, stream: AttemptStream, seen: dict[type, float]) -> None:
        """Notes into `seen`."""
        self._stream, self._seen = stream, seen

    async def send(self, message: AttemptUp) -> None:
        """A proposal is noted when it is about to leave, a grant when it has left."""
        if isinstance(message, Proposal):
            self._seen[Proposal] = time.monotonic()
        await self._stream.send(message)
        self._seen.setdefault(type(message), time.monotonic())

    async def messages(self) -> AsyncIterator[AttemptDown]:
        """Noted as they arrive."""
        async for message in self._stream.messages():
            self._seen.setdefault(type(message), time.monotonic())
            yield message

    def cancel(self) -> None:
        """As the stream's own."""
        self._stream.cancel()


class WatchedPair:
    """A pair whose attempts are watched; everything else is the pair's own."""

    def __init__(self, pair: OutgoingPair) -> None:
        """Watches this one."""
        self._pair = pair
        self.seen: dict[type, float] = {}

    def __getattr__(self, name: str) -> object:
        """Whatever an attempt asks of its pair beside a stream."""
        return getattr(self._pair, name)

    def open_attempt(self) -> WatchedStream:
        """A new stream, and nothing seen."""
        self.seen = {}
        return WatchedStream(self._pair.open_attempt(), self.seen)


async def measure_handoff(plan: HandoffPlan, limits: Limits, advance: Callable[[], None]) -> list[Figure]:
    """Every stage in microseconds; `advance` is called once a request. Raises `BenchFailed`."""
    secret = secrets.token_hex(16)
    async with AsyncExitStack() as stack:
        scratch = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        model = make_tiny_model(scratch / "tiny", context_length=_CONTEXT)
        shared = ("--model", str(model), "--transport", plan.transport, "--log-level", "error", "--threads", "1")
        flags = ("--prefill-blocks", str(_PREFILL_BLOCKS), "--chunk-tokens", str(_BLOCK_SIZE))
        prefill = await stack.enter_async_context(server("prefill", (*shared, *flags), limits, secret=secret))
        flags = ("--decode-blocks", str(_DECODE_BLOCKS), "--prefill-addresses", prefill.where)
        door = await stack.enter_async_context(server("decode", (*shared, *flags), limits, secret=secret))
        config = DecodeConfig(model, secret, (prefill.where,), num_blocks=_DECODE_BLOCKS, transport=plan.transport)
        runner = load_engine(config)
        chosen = await choose_transport(TransportChoice(plan.transport, config.host), secret)
        stack.push_async_callback(chosen.transport.close)
        decode = await stack.enter_async_context(serving_decode(config, runner, chosen.transport))
        attempts = _Attempts(decode, runner, limits)
        stack.callback(attempts.close)
        await attempts.paired()
        client = GrpcDecodeClient(door.where, secret, _CONTEXT)
        stack.push_async_callback(client.close)
        return await _measure(plan, attempts, _Door(client, limits), advance)


async def _measure(plan: HandoffPlan, attempts: _Attempts, door: _Door, advance: Callable[[], None]) -> list[Figure]:
    samples: dict[str, list[float]] = {stage: [] for stage in _STAGES}
    warm_up = 1 + plan.num_requests // 10
    for number in range(warm_up + plan.num_requests):
        stages = await attempts.handoff(plan.prompt_tokens)
        stages["rejected by prefill"] = await attempts.rejection(_PREFILL_BLOCKS * _BLOCK_SIZE + 1)
        stages["rejected at the door"] = await door.rejection(_DECODE_BLOCKS * _BLOCK_SIZE + 1)
        if number >= warm_up:
            for stage, seconds in stages.items():
                samples[stage].append(seconds / _MICRO)
        advance()
    return [Figure(stage, "us", tuple(values)) for stage, values in samples.items()]


class _Attempts:
    """The decode side's attempts, with nothing in front of them."""

    def __init__(self, decode: RunningDecode, runner: ModelRunner, limits: Limits) -> None:
        self._decode, self._limits = decode, limits
        self._fingerprint = runner.layout.fingerprint(runner.facts.fingerprint)
        self._vocab_size = runner.facts.vocab_size
        self._thread = WorkThread("attempts")
        self._num = 0

    def close(self) -> None:
        self._thread.close()

    async def paired(self) -> None:
        """Until attempts can be opened."""
        pair = self._decode.peers.pairs[0]
        try:
            async with asyncio.timeout(self._limits.attempt_s):
                while not pair.is_ready:  # noqa: ASYNC110  a pair has no event for what is asked here
                    await asyncio.sleep(self._limits.pace_s)
        except TimeoutError:
            raise BenchFailed(f"the pair is not ready: {pair.state} {pair.detail}") from None

    async def handoff(self, num_tokens: int) -> dict[str, float]:
        """One whole handoff; its stages in seconds. The room is given back."""
        seen, over, end = await self._run(num_tokens)
        if not isinstance(end, Arrived):
            raise BenchFailed(f"a handoff ended as {end}")
        for room in end.rooms:
            self._decode.memory.kv.free(room)
        return {
            "verdict": seen[Admitted] - seen[Proposal],
            "ready": seen[Ready] - seen[Admitted],
            "grant": seen[Grant] - seen[Ready],
            "handoff": seen[Grant] - seen[Proposal],
            "arrived": over - seen[Proposal],
        }

    async def rejection(self, num_tokens: int) -> float:
        """One verdict that refuses; seconds from its proposal."""
        seen, over, end = await self._run(num_tokens)
        if not isinstance(end, Rejected):
            raise BenchFailed(f"what cannot fit ended as {end}")
        return over - seen[Proposal]

    async def _run(self, num_tokens: int) -> tuple[dict[type, float], float, object]:
        (peer,) = self._decode.peers.candidates(())
        watched = WatchedPair(peer.pair)
        # It has all that an attempt asks of its pair; the field is typed by the one class that ships.
        seen_peer = Peer(cast("OutgoingPair", watched), peer.dock)
        attempt = AttemptRun(self._proposal(num_tokens), seen_peer, self._decode.memory, self._thread, self._vocab_size)
        end = await attempt.run()
        return watched.seen, time.monotonic(), end

    def _proposal(self, num_tokens: int) -> Proposal:
        self._num += 1
        return Proposal(
            RequestId(f"bench-{self._num}"),
            1,
            TenantId("bench"),
            tuple(10 + (self._num + position) % 100 for position in range(num_tokens)),
            2,
            SamplingParams(),
            frozenset(),
            self._limits.attempt_s,
            Incarnation(self._decode.report().incarnation),
            self._decode.peers.pairs[0].epoch,
            self._fingerprint,
        )


class _Door:
    """A decode server as its gateway sees it."""

    def __init__(self, client: GrpcDecodeClient, limits: Limits) -> None:
        self._client, self._limits = client, limits

    async def rejection(self, num_tokens: int) -> float:
        """One request that could never fit; seconds until its verdict."""
        request = GenerationRequest(
            RequestId("bench"),
            TenantId("bench"),
            tuple(10 + position % 100 for position in range(num_tokens)),
            1,
            SamplingParams(),
            frozenset(),
            self._limits.attempt_s,
            (),
        )
        started = time.monotonic()
        events = [event async for event in self._client.generate(request)]
        if not isinstance(events[-1], Rejected):
            raise BenchFailed(f"what cannot fit ended as {events[-1]}")
        return time.monotonic() - started
