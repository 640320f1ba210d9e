"""A prefill server goes away under load and comes back: every request ends once, and the pair is made anew."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path

import pytest

from decode_server.app import serving as serving_decode
from decode_server.config import DecodeConfig
from kvlease.handoff.messages import ChoiceFinished, Finished, TokensGenerated
from kvlease.peering.channels import open_channel
from kvlease.peering.limits import Limits
from kvlease.v1.kvlease_pb2_grpc import DecodeStub
from prefill_server.app import RunningPrefill
from prefill_server.app import serving as serving_prefill
from prefill_server.config import PrefillConfig
from tests.cluster.harness import SECRET, Cluster, Oracle, Shape, cluster, load, prompt_of, request_of
from tests.waiting import until
from transport.memory import FaultPlan, MemoryHub, MemoryTransport
from transport.tcp.transport import TcpTransport

#: Far below the deadline of the requests: an end that only the deadline brings is none.
SOON_S = 5.0


async def end_under_load(running: Cluster, prefill: RunningPrefill) -> None:
    """Stop prefill while it computes; all clients hear one end, soon, and decode's pool is full again."""
    requests = [asyncio.create_task(running.events(request_of(prompt_of(700, n), 200))) for n in range(8)]
    await until(lambda: prefill.queue.num_begun > 0, what="prefill is busy")
    await prefill.server.stop(0)
    async with asyncio.timeout(SOON_S):
        all_events = await asyncio.gather(*requests)
    for events in all_events:
        assert sum(not isinstance(event, TokensGenerated) for event in events) == 1
        assert not isinstance(events[-1], TokensGenerated | ChoiceFinished)
        assert isinstance(events[-1], Finished) or events[-1].http_status == 503
    counts = running.decode.memory.kv.counts
    await until(lambda: counts().free == counts().total, within_s=1.0, what="decode's pool is full again")
    running.decode.memory.kv.pool.check()


def test_each_request_ends_soon_and_once_when_prefill_stops_at_any_moment(model: Path) -> None:
    async def test() -> None:
        for _ in range(8):  # the moment of the stop differs from round to round
            async with cluster(model) as running:
                await end_under_load(running, running.prefill)

    asyncio.run(test())


def test_decode_pairs_with_a_restarted_prefill_server_under_a_new_epoch(model: Path, oracle: Oracle) -> None:
    async def test() -> None:
        sending, receiving = TcpTransport(SECRET), TcpTransport(SECRET)
        first_runner, decode_runner = load(model, 128), load(model, 128)
        async with serving_prefill(PrefillConfig(model, SECRET), first_runner, sending) as prefill:
            port = int(prefill.address.rpartition(":")[2])
            decode_config = DecodeConfig(model, SECRET, (prefill.address,))
            decode_context = serving_decode(decode_config, decode_runner, receiving)
            decode = await decode_context.__aenter__()
            (pair,) = decode.peers.pairs
            await until(lambda: pair.is_ready, within_s=10, what="the pair is ready")
            epoch, channel = pair.epoch, open_channel(decode.address, 4096, Limits())
            running = Cluster(prefill, decode, first_runner, decode_runner, DecodeStub(channel))
            await end_under_load(running, prefill)
        await until(lambda: not pair.is_ready, what="the pair is known to be lost")
        again, second_runner = TcpTransport(SECRET), load(model, 128)
        async with serving_prefill(PrefillConfig(model, SECRET, port=port), second_runner, again):
            await until(lambda: pair.is_ready, within_s=10, what="the pair is made anew")
            assert pair.epoch != epoch
            prompt = prompt_of(160)
            assert await running.text(request_of(prompt)) == oracle.text(prompt, 8)
            await channel.close()
            await decode_context.__aexit__(None, None, None)
        for transport in (sending, receiving, again):
            await transport.close()

    asyncio.run(test())


@pytest.mark.parametrize("seed", range(3))
def test_while_channels_break_and_clients_leave_each_request_ends_once_and_right(
    model: Path, oracle: Oracle, seed: int
) -> None:
    draw = random.Random(seed)
    hub = MemoryHub(FaultPlan(seed=seed, break_rate=0.01, stray_rate=0.02, delay_s=(0.0, 0.002)))
    shape = Shape(wrap_prefill=lambda _: MemoryTransport(hub), wrap_decode=lambda _: MemoryTransport(hub))
    prompts = [prompt_of(draw.choice((1, 16, 33, 130, 300)), seed) for seed in range(10)]

    async def test() -> None:
        async with cluster(model, shape) as running:

            async def one(number: int) -> str:
                await asyncio.sleep(draw.random())  # requests arrive all along, also while there is no pair
                prompt, length = draw.choice(prompts), draw.choice((1, 3, 8))
                task = asyncio.create_task(running.events(request_of(prompt, length, remaining_s=20.0)))
                if number % 4 == 0:
                    await asyncio.sleep(draw.random() * 0.2)
                    task.cancel()
                    await asyncio.wait([task])
                    return "left"
                events = await task
                assert sum(not isinstance(event, TokensGenerated) for event in events) == 1
                tokens = tuple(t for event in events[:-1] for t in getattr(event, "token_ids", ()))
                if isinstance(events[-1], Finished):
                    assert tokens == oracle.text(prompt, length)
                    return "right"
                assert tokens == ()
                return "refused"

            ends = Counter(await asyncio.gather(*(one(number) for number in range(120))))
            assert ends["right"] > 10, ends
            await running.until_pools_are_full()

    asyncio.run(test())
