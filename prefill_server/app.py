"""The prefill server's composition root: builds every long-lived object and closes them in reverse.

Never: decides anything about a request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import grpc.aio

from kvlease.engine.hosting import load_engine
from kvlease.engine.runner import ModelRunner
from kvlease.engine.work_thread import WorkThread
from kvlease.kvcache.memory import KVMemory
from kvlease.kvcache.pool import BlockPool
from kvlease.kvcache.seal import sealed_block_bytes
from kvlease.peering.agreement import party_of
from kvlease.peering.channels import make_server
from kvlease.peering.heartbeat import Beat
from kvlease.peering.hosting import aclosing_transport, advertised, ended, listen, until_signal
from kvlease.peering.incoming import IncomingPair, IncomingPairs
from kvlease.peering.limits import Limits
from kvlease.peering.status import ServerReport
from kvlease.peering.transports import ChosenTransport, TransportChoice, choose_transport
from kvlease.v1.kvlease_pb2_grpc import add_PrefillServicer_to_server
from prefill_server.config import PrefillConfig
from prefill_server.departure import DepartureLine
from prefill_server.rpc import PrefillRpc
from prefill_server.scheduler import PromptQueue
from prefill_server.service import Identity, PrefillService
from prefill_server.worker import ComputeLoop
from transport.contract import Transport


@dataclass(frozen=True, slots=True)
class RunningPrefill:
    """A prefill server that listens, and its parts: for its composition root and for tests of the whole."""

    address: str  # what its peers know it by
    server: grpc.aio.Server
    kv: KVMemory
    service: PrefillService
    pairs: IncomingPairs
    queue: PromptQueue
    report: Callable[[], ServerReport]
    work: tuple[asyncio.Task[None], ...]  # loops that never end by themselves


async def run(config: PrefillConfig, ready: Callable[[str], None]) -> None:
    """Serve until told to stop; `ready` is called with the address once it listens."""
    choice = TransportChoice(config.transport, config.host, config.advertise, config.rdma_device)
    chosen = await choose_transport(choice, config.secret)  # before the model: what cannot be had is said at once
    async with aclosing_transport(chosen.transport), _running(config, load_engine(config), chosen) as running:
        ready(running.address)
        await until_signal(running.work)
        running.service.is_draining = True
        await running.server.stop(Limits().drain_s)


def serving(
    config: PrefillConfig, runner: ModelRunner, transport: Transport
) -> AbstractAsyncContextManager[RunningPrefill]:
    """The server on a transport that somebody else chose, from listening to stopped."""
    return _running(config, runner, ChosenTransport(transport, f"{transport.name}, as given"))


@asynccontextmanager
async def _running(
    config: PrefillConfig, runner: ModelRunner, chosen: ChosenTransport
) -> AsyncIterator[RunningPrefill]:
    async with AsyncExitStack() as stack:
        yield await _start(config, runner, chosen, stack)


async def _start(
    config: PrefillConfig, runner: ModelRunner, chosen: ChosenTransport, stack: AsyncExitStack
) -> RunningPrefill:
    facts, layout, limits, transport = runner.facts, runner.layout, Limits(), chosen.transport
    kv = KVMemory(BlockPool(runner.storage.num_blocks), runner.ledger, runner.storage)
    compute_thread, seal_thread = WorkThread("engine"), WorkThread("departure")
    stack.callback(compute_thread.close)
    stack.callback(seal_thread.close)
    server = make_server(config.secret, facts.context_length, limits)
    address = advertised(listen(server, config.host, config.port), config.advertise)
    queue = PromptQueue(kv, config.chunk_tokens)
    compute = ComputeLoop(queue, kv, runner, compute_thread)
    party = party_of(config, runner, address, transport.name)
    counters: Counter[str] = Counter()
    lines: WeakKeyDictionary[IncomingPair, DepartureLine] = WeakKeyDictionary()  # each goes with its pair

    def line_of(pair: IncomingPair) -> DepartureLine:
        return lines.setdefault(pair, DepartureLine(kv, seal_thread, counters))

    async def depart(pair: IncomingPair) -> None:
        await line_of(pair).run(pair.departure)

    def beat() -> Beat:
        return Beat(runner.pulse, compute.is_busy)

    pairs = IncomingPairs(party, lambda size: sealed_block_bytes(layout, size), transport, beat, depart)
    identity = Identity(party.fingerprint, party.pool_tokens, party.capacity, facts.vocab_size, config.max_queue)
    service = PrefillService(identity, kv, queue, pairs, line_of)

    def report() -> ServerReport:
        return ServerReport(
            "prefill",
            address,
            party.incarnation,
            facts.name,
            runner.dtype,
            config.block_size,
            kv.counts(),
            queue.num_waiting,
            queue.num_begun,
            party.capacity,
            pairs.reports(),
            counters + service.counters,
            chosen.account,
        )

    add_PrefillServicer_to_server(PrefillRpc(service, pairs, report), server)
    work = asyncio.create_task(compute.run(), name="the compute loop")
    stack.push_async_callback(ended, work)
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return RunningPrefill(address, server, kv, service, pairs, queue, report, (work,))
