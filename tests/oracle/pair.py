"""A real prefill and a real decode server of one process, over gRPC on loopback, and a client of them.

Never: replaces a part of either; a watched runner only looks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import decode_server.app
import prefill_server.app
from decode_server.config import DecodeConfig
from kvlease.engine.batch import SequenceStep
from kvlease.engine.loading import CausalModel
from kvlease.engine.runner import Drawn, ModelRunner
from kvlease.handoff.messages import (
    DEFAULT_TENANT,
    Finished,
    GenerationEvent,
    GenerationRequest,
    RequestId,
    TokensGenerated,
)
from kvlease.handoff.wire import decode_event, encode_request
from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.storage import KVStorage
from kvlease.models.facts import ModelFacts
from kvlease.peering.channels import credentials, open_channel
from kvlease.peering.hosting import aclosing_transport
from kvlease.peering.limits import Limits
from kvlease.sampling.params import SamplingParams
from kvlease.v1 import kvlease_pb2_grpc as rpc
from prefill_server.config import PrefillConfig
from tests.waiting import until
from transport.contract import Transport
from transport.memory import MemoryHub, MemoryTransport
from transport.rdma import DeviceChoice, open_rdma
from transport.tcp.transport import TcpTransport

SECRET = "a secret of the oracle"


@dataclass(frozen=True, slots=True)
class Loaded:
    """A model in memory: both servers compute with the same weights, each in a pool of its own."""

    folder: Path
    facts: ModelFacts
    model: CausalModel
    dtype: str = "float32"


@dataclass(frozen=True, slots=True)
class Setting:
    """What differs from one pair to the next."""

    block_size: int = 16
    chunk_tokens: int = 512
    transport: str = "tcp"


class WatchedRunner(ModelRunner):
    """Notes a prompt's canonical blocks by its length: on prefill when the last is computed, on decode before the first step."""

    def __init__(self, loaded: Loaded, block_size: int, num_tokens: int, *, is_prefill: bool) -> None:
        facts = loaded.facts
        layout = attention_layout(facts.num_layers, facts.num_kv_heads, facts.head_dim, loaded.dtype)
        num_blocks = -(-num_tokens // block_size)
        storage = KVStorage(layout, num_blocks, block_size)
        super().__init__(loaded.model, facts, storage, SlotLedger(num_blocks, block_size))
        self.is_prefill = is_prefill
        self.blocks: dict[int, list[bytes]] = {}
        self._seen: set[int] = set()

    def run(self, steps: Sequence[SequenceStep]) -> tuple[Drawn, ...]:
        if not self.is_prefill:
            for step in steps:
                if step.context.sequence_id not in self._seen:
                    self._seen.add(step.context.sequence_id)
                    self._note(step.context.table, step.context.num_tokens)
        drawn = super().run(steps)
        if self.is_prefill:
            for step in steps:
                if step.draws:
                    self._note(step.context.table, step.num_tokens)
        return drawn

    def _note(self, table: tuple[int, ...], num_tokens: int) -> None:
        size = self.storage.block_size
        self.blocks[num_tokens] = [
            bytes(self.storage.read_canonical(table, first, min(size, num_tokens - first), size))
            for first in range(0, num_tokens, size)
        ]


@dataclass(frozen=True, slots=True)
class Pair:
    """Both servers' runners, and a way to decode's front door."""

    prefill: WatchedRunner
    decode: WatchedRunner
    stub: rpc.DecodeAsyncStub

    async def generate(self, prompt: tuple[int, ...], max_tokens: int) -> tuple[int, ...]:
        """The greedy continuation; fails the test if the text does not finish."""
        request = GenerationRequest(
            RequestId("oracle"), DEFAULT_TENANT, prompt, max_tokens, SamplingParams(), frozenset(), 300.0, ()
        )
        tokens: list[int] = []
        last: GenerationEvent | None = None
        async for message in self.stub.Generate(encode_request(request), metadata=credentials(SECRET)):
            last = decode_event(message)
            if isinstance(last, TokensGenerated):
                tokens += last.token_ids
        assert isinstance(last, Finished), last
        return tuple(tokens)

    async def generate_all(self, prompts: Sequence[tuple[int, ...]], max_tokens: int) -> list[tuple[int, ...]]:
        """All at once."""
        return await asyncio.gather(*(self.generate(prompt, max_tokens) for prompt in prompts))


@asynccontextmanager
async def running_pair(loaded: Loaded, setting: Setting, pool_tokens: int) -> AsyncIterator[Pair]:
    """Both servers, paired."""
    prefill = WatchedRunner(loaded, setting.block_size, pool_tokens, is_prefill=True)
    decode = WatchedRunner(loaded, setting.block_size, pool_tokens, is_prefill=False)
    size = setting.block_size
    first = PrefillConfig(loaded.folder, SECRET, block_size=size, chunk_tokens=setting.chunk_tokens)
    hub = MemoryHub()
    async with (
        aclosing_transport(_transport(setting, hub)) as sending,
        aclosing_transport(_transport(setting, hub)) as landing,
        prefill_server.app.serving(first, prefill, sending) as front,
    ):
        second = DecodeConfig(loaded.folder, SECRET, (front.address,), block_size=size)
        async with decode_server.app.serving(second, decode, landing) as back:
            await until(lambda: all(pair.report().state == "ready" for pair in back.peers.pairs), within_s=20)
            async with open_channel(back.address, loaded.facts.context_length, Limits()) as channel:
                yield Pair(prefill, decode, rpc.DecodeStub(channel))


def _transport(setting: Setting, hub: MemoryHub) -> Transport:
    match setting.transport:
        case "memory":
            return MemoryTransport(hub)
        case "rdma":
            return open_rdma(DeviceChoice())
        case _:
            return TcpTransport(SECRET, "127.0.0.1")
