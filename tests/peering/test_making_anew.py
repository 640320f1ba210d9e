"""How often a pair is made anew: soon after a long life, ever more slowly while its cause stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from kvlease.handoff.messages import Incarnation
from kvlease.peering.agreement import Party
from kvlease.peering.channels import make_server
from kvlease.peering.heartbeat import Beat
from kvlease.peering.hosting import ended
from kvlease.peering.incoming import IncomingPair, IncomingPairs
from kvlease.peering.limits import Limits
from kvlease.peering.outgoing import OutgoingPair
from kvlease.v1 import kvlease_pb2_grpc as rpc
from tests.waiting import until
from transport.contract import Landing
from transport.errors import ChannelBroken
from transport.tcp import TcpTransport


def party(name: bytes) -> Party:
    """Of a model whose sealed blocks of 16 tokens have 1,024 bytes."""
    return Party("127.0.0.1:1", Incarnation(name * 16), b"f" * 16, "a layout", 2048, 1024, 0, 16, 8 << 10, 1024, "tcp")


@dataclass
class Prefill(rpc.PrefillServicer):
    """A real prefill side of pairs, without an engine behind it."""

    pairs: IncomingPairs

    async def Pair(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        await self.pairs.serve(aiter(request_iterator), context)

    def Attempt(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def Status(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


@asynccontextmanager
async def pair_landing(land: Callable[[OutgoingPair, Landing], Awaitable[None]]) -> AsyncIterator[OutgoingPair]:
    """A pair of which only the decode side's landing is made up."""

    async def depart(_pair: IncomingPair) -> None:
        await asyncio.Event().wait()

    sending, receiving = TcpTransport("s"), TcpTransport("s")
    server = make_server("s", 64, Limits())
    pairs = IncomingPairs(party(b"p"), lambda _: 1024, sending, lambda: Beat(0, is_busy=False), depart)
    rpc.add_PrefillServicer_to_server(Prefill(pairs), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield OutgoingPair(address, party(b"d"), "s", receiving, lambda: Beat(0, is_busy=False), land)
    await server.stop(0)
    await sending.close()
    await receiving.close()


def test_a_pair_that_breaks_at_once_is_made_anew_ever_more_slowly() -> None:
    broke_at_s: list[float] = []

    async def land(_pair: OutgoingPair, _landing: Landing) -> None:
        broke_at_s.append(asyncio.get_running_loop().time())
        raise ChannelBroken("the cause is still there")

    async def test() -> None:
        async with pair_landing(land) as pair:
            keeping = asyncio.create_task(pair.keep())
            await until(lambda: len(broke_at_s) == 5, within_s=20, what="it was made anew four times")
            await asyncio.wait_for(ended(keeping), 5)
        pauses = [after - before for before, after in pairwise(broke_at_s)]
        for number, pause in enumerate(pauses):
            assert pause > Limits().backoff_s * 2**number, pauses

    asyncio.run(test())


def test_a_cancel_that_meets_a_break_ends_the_pair_all_the_same() -> None:
    tasks: list[asyncio.Task[None]] = []

    async def land(_pair: OutgoingPair, _landing: Landing) -> None:
        tasks[0].cancel()
        raise ChannelBroken("at the very moment")

    async def test() -> None:
        async with pair_landing(land) as pair:
            tasks.append(asyncio.create_task(pair.keep()))
            await asyncio.wait(tasks, timeout=5)
            assert tasks[0].cancelled()
            assert not pair.is_ready

    asyncio.run(test())
