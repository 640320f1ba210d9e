"""The decode server's composition root: builds every long-lived object and closes them in reverse.

Never: decides anything about a request.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass

import grpc.aio

from decode_server.config import DecodeConfig
from decode_server.memory import DecodeMemory
from decode_server.peers import PeerMaker, Peers
from decode_server.rpc import DecodeRpc
from decode_server.sequences import RunningBatch
from decode_server.service import DecodeService, Identity
from decode_server.worker import decode_tokens
from kvlease.engine.hosting import load_engine
from kvlease.engine.runner import ModelRunner
from kvlease.engine.work_thread import WorkThread
from kvlease.handoff.limits import Limits as HandoffLimits
from kvlease.kvcache.memory import KVMemory
from kvlease.kvcache.pool import BlockPool
from kvlease.peering.agreement import party_of
from kvlease.peering.channels import make_server
from kvlease.peering.heartbeat import Beat
from kvlease.peering.hosting import aclosing_transport, advertised, ended, listen, until_signal
from kvlease.peering.limits import Limits
from kvlease.peering.status import ServerReport
from kvlease.peering.transports import ChosenTransport, TransportChoice, choose_transport
from kvlease.v1.kvlease_pb2_grpc import add_DecodeServicer_to_server
from transport.contract import Transport


@dataclass(frozen=True, slots=True)
class RunningDecode:
    """A decode server that listens, and its parts: for its composition root and for tests of the whole."""

    address: str  # what its peers know it by
    server: grpc.aio.Server
    service: DecodeService
    peers: Peers
    memory: DecodeMemory
    batch: RunningBatch
    report: Callable[[], ServerReport]
    work: tuple[asyncio.Task[None], ...]  # loops that never end by themselves


async def run(config: DecodeConfig, ready: Callable[[str], None]) -> None:
    """Serve until told to stop; `ready` is called with the address once it listens."""
    choice = TransportChoice(config.transport, config.host, config.advertise, config.rdma_device)
    chosen = await choose_transport(choice, config.secret)  # before the model: what cannot be had is said at once
    async with aclosing_transport(chosen.transport), _running(config, load_engine(config), chosen) as running:
        ready(running.address)
        await until_signal(running.work)
        running.service.is_draining = True
        await running.server.stop(Limits().drain_s)


def serving(
    config: DecodeConfig, runner: ModelRunner, transport: Transport
) -> AbstractAsyncContextManager[RunningDecode]:
    """The server on a transport that somebody else chose, from listening to stopped."""
    return _running(config, runner, ChosenTransport(transport, f"{transport.name}, as given"))


@asynccontextmanager
async def _running(config: DecodeConfig, runner: ModelRunner, chosen: ChosenTransport) -> AsyncIterator[RunningDecode]:
    async with AsyncExitStack() as stack:
        yield await _start(config, runner, chosen, stack)


async def _start(
    config: DecodeConfig, runner: ModelRunner, chosen: ChosenTransport, stack: AsyncExitStack
) -> RunningDecode:
    facts, limits, transport = runner.facts, Limits(), chosen.transport
    kv = KVMemory(BlockPool(runner.storage.num_blocks), runner.ledger, runner.storage)
    memory = DecodeMemory(kv, HandoffLimits().max_bypass)
    compute_thread, land_thread = WorkThread("engine"), WorkThread("landing")
    stack.callback(compute_thread.close)
    stack.callback(land_thread.close)
    server = make_server(config.secret, facts.context_length, limits)
    address = advertised(listen(server, config.host, config.port), config.advertise)
    batch = RunningBatch(kv.ledger, config.max_batch)
    party = party_of(config, runner, address, transport.name)
    counters: Counter[str] = Counter()

    def beat() -> Beat:
        return Beat(runner.pulse, len(batch) > 0)

    maker = PeerMaker(party, config.secret, transport, beat, memory, land_thread, counters)
    peers = Peers([maker.make(peer_address) for peer_address in config.prefill_servers])
    context_length = config.max_model_len or facts.context_length
    identity = Identity(
        party.incarnation, party.fingerprint, party.pool_tokens, context_length, facts.vocab_size, config.max_queue
    )
    service = DecodeService(identity, peers, memory, batch, land_thread)

    def report() -> ServerReport:
        return ServerReport(
            "decode",
            address,
            party.incarnation,
            facts.name,
            runner.dtype,
            config.block_size,
            kv.counts(),
            service.num_waiting,
            len(batch),
            service.max_model_len,
            [pair.report() for pair in peers.pairs],
            counters + service.counters,
            chosen.account,
        )

    add_DecodeServicer_to_server(DecodeRpc(service, report), server)
    work = [asyncio.create_task(pair.keep(), name=f"the pair with {pair.peer_address}") for pair in peers.pairs]
    work.append(asyncio.create_task(decode_tokens(batch, memory, runner, compute_thread), name="the token loop"))
    for task in work:
        stack.push_async_callback(ended, task)
    await server.start()
    stack.push_async_callback(server.stop, 0)
    return RunningDecode(address, server, service, peers, memory, batch, report, tuple(work))
