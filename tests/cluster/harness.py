"""A prefill and a decode server in this process: real gRPC, real sockets, a real (tiny) model; and an oracle without either."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from decode_server.app import RunningDecode
from decode_server.app import serving as serving_decode
from decode_server.config import DecodeConfig
from kvlease.engine.batch import Draw, SequenceStep
from kvlease.engine.runner import ModelRunner
from kvlease.handoff.messages import (
    Finished,
    GenerationEvent,
    GenerationRequest,
    RequestId,
    TenantId,
    TokensGenerated,
)
from kvlease.handoff.wire import decode_event, encode_request
from kvlease.peering.channels import credentials, open_channel
from kvlease.peering.limits import Limits
from kvlease.sampling.params import SamplingParams
from kvlease.v1.kvlease_pb2_grpc import DecodeStub
from prefill_server.app import RunningPrefill
from prefill_server.app import serving as serving_prefill
from prefill_server.config import PrefillConfig
from tests.waiting import until
from transport.contract import Transport
from transport.tcp.transport import TcpTransport

if TYPE_CHECKING:  # the stubs know two kinds of client, the code only one
    from kvlease.v1.kvlease_pb2_grpc import DecodeAsyncStub  # noqa: TC004 - a class of the stubs alone

SECRET = "a secret of the tests"
_ids = count(1)


def prompt_of(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    """Token ids that a tiny model knows, none of them special."""
    return tuple(int(token) for token in np.random.default_rng(seed).integers(10, 200, num_tokens))


def request_of(prompt: Sequence[int], max_tokens: int = 8, **other: object) -> GenerationRequest:
    """A greedy request that nothing ends but its length."""
    fields: dict[str, object] = {
        "end_token_ids": frozenset(),
        "remaining_s": 30.0,
        "tenant": TenantId("tests"),
        "sampling": SamplingParams(),
        **other,
    }
    return GenerationRequest(
        request_id=RequestId(f"r{next(_ids)}"),
        prompt_token_ids=tuple(prompt),
        max_tokens=max_tokens,
        prefill_candidates=(),
        **fields,  # type: ignore[arg-type]
    )


class Oracle:
    """The same model in one process, without servers."""

    def __init__(self, folder: Path) -> None:
        """Loads it once."""
        self._runner = load(folder, 128)
        self._known: dict[tuple[tuple[int, ...], int], tuple[int, ...]] = {}

    def text(self, prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
        """Greedy token ids."""
        key = (tuple(prompt), max_tokens)
        if key not in self._known:
            self._known[key] = self._generate(*key)
        return self._known[key]

    def _generate(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        runner, sequence_id = self._runner, next(_ids)
        table = tuple(range(128))
        runner.ledger.clear(table)
        tokens, fresh = list(prompt), prompt
        for _ in range(max_tokens):
            context = runner.ledger.readable(sequence_id, table, len(tokens) - len(fresh))
            ((drawn,),) = runner.run([SequenceStep(context, fresh, (Draw(SamplingParams()),))])
            tokens.append(drawn.token_id)
            fresh = (drawn.token_id,)
        return tuple(tokens[len(prompt) :])


def load(folder: Path, num_blocks: int, block_size: int = 16) -> ModelRunner:
    """A model with its own pool."""
    return ModelRunner.load(folder, dtype="float32", device="cpu", num_blocks=num_blocks, block_size=block_size)


@dataclass(slots=True)
class Cluster:
    """One pair, and a client of decode's own door."""

    prefill: RunningPrefill
    decode: RunningDecode
    prefill_runner: ModelRunner
    decode_runner: ModelRunner
    stub: DecodeAsyncStub

    async def events(self, request: GenerationRequest) -> list[GenerationEvent]:
        """Everything that becomes of it."""
        call = self.stub.Generate(encode_request(request), metadata=credentials(SECRET))
        return [decode_event(message) async for message in call]

    async def text(self, request: GenerationRequest) -> tuple[int, ...]:
        """Its tokens; it must finish."""
        events = await self.events(request)
        assert isinstance(events[-1], Finished), events[-1]
        return tuple(token for event in events if isinstance(event, TokensGenerated) for token in event.token_ids)

    def pools_are_full(self) -> bool:
        """Every block of both is free."""
        return all(counts.free == counts.total for counts in (self.prefill.kv.counts(), self.decode.memory.kv.counts()))

    async def until_pools_are_full(self) -> None:
        """Within a second, as promised; and the books agree."""
        await until(self.pools_are_full, within_s=1.0, what="both pools are full again")
        self.prefill.kv.pool.check()
        self.decode.memory.kv.pool.check()


@dataclass(frozen=True, slots=True)
class Shape:
    """How the two servers are made. `wrap_*` may put a double around a transport or a runner, `in_front` one before prefill's address."""

    prefill_blocks: int = 128
    decode_blocks: int = 128
    prefill_block_size: int = 16
    decode_block_size: int = 16
    chunk_tokens: int = 512
    max_queue: int = 1024
    advertise: str = ""
    wrap_prefill: Callable[[Transport], Transport] = field(default=lambda transport: transport)
    wrap_decode: Callable[[Transport], Transport] = field(default=lambda transport: transport)
    make_runner: Callable[[Path, int, int], ModelRunner] = load
    wrap_decode_runner: Callable[[ModelRunner], ModelRunner] = field(default=lambda runner: runner)
    in_front: Callable[[str], AbstractAsyncContextManager[str]] = nullcontext


@asynccontextmanager
async def cluster(folder: Path, shape: Shape | None = None) -> AsyncIterator[Cluster]:
    """Both servers, paired and ready."""
    shape = shape or Shape()
    prefill_runner = shape.make_runner(folder, shape.prefill_blocks, shape.prefill_block_size)
    decode_runner = shape.make_runner(folder, shape.decode_blocks, shape.decode_block_size)
    decode_runner = shape.wrap_decode_runner(decode_runner)
    prefill_config = PrefillConfig(
        folder,
        SECRET,
        advertise=shape.advertise,
        block_size=shape.prefill_block_size,
        chunk_tokens=shape.chunk_tokens,
        max_queue=shape.max_queue,
    )
    sending, receiving = TcpTransport(SECRET, advertise=shape.advertise), TcpTransport(SECRET)
    try:
        async with (
            serving_prefill(prefill_config, prefill_runner, shape.wrap_prefill(sending)) as prefill,
            shape.in_front(prefill.address) as prefill_address,
        ):
            decode_config = DecodeConfig(
                folder,
                SECRET,
                (prefill_address,),
                advertise=shape.advertise,
                block_size=shape.decode_block_size,
                max_queue=shape.max_queue,
            )
            async with serving_decode(decode_config, decode_runner, shape.wrap_decode(receiving)) as decode:
                await until(lambda: decode.peers.pairs[0].is_ready, within_s=10, what="the pair is ready")
                channel = open_channel(decode.address, 4096, Limits())
                yield Cluster(prefill, decode, prefill_runner, decode_runner, DecodeStub(channel))
                await channel.close()
    finally:
        await sending.close()
        await receiving.close()
