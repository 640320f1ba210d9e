"""A prefill server that lives and owes something which never comes: the request ends by its progress, not by its deadline."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kvlease.engine.runner import ModelRunner
from kvlease.handoff.limits import Limits
from kvlease.handoff.messages import Aborted, AbortReason
from kvlease.v1 import kvlease_pb2 as pb
from tests.cluster.harness import Shape, cluster, prompt_of, request_of
from tests.cluster.lying import Play, lying

Up = AsyncIterator[pb.AttemptUp]
Send = Callable[[pb.AttemptDown], Awaitable[None]]


async def no_verdict(up: Up, _send: Send) -> None:
    async for _ in up:
        pass


async def no_block(up: Up, send: Send) -> None:
    await send(pb.AttemptDown(admitted=pb.Admitted()))
    await send(pb.AttemptDown(ready=pb.Ready()))
    async for _ in up:
        pass


@pytest.mark.parametrize(("play", "missing"), [(no_verdict, "the verdict is"), (no_block, "7 blocks are")])
def test_what_never_comes_from_an_idle_prefill_server_ends_the_attempt(model: Path, play: Play, missing: str) -> None:
    async def test() -> None:
        async with cluster(model, Shape(in_front=lying(play=play))) as running:
            began = time.monotonic()
            (end,) = await running.events(request_of(prompt_of(100), remaining_s=60.0))
            assert isinstance(end, Aborted)
            assert (end.reason, end.http_status) == (AbortReason.PEER_STALLED, 503)
            assert f"{missing} missing" in end.message
            # Each attempt waits once in vain, or twice when a beat fell into its first wait.
            assert time.monotonic() - began < 2 * Limits().max_attempts * Limits().stall_s + 2.0
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_prefill_server_that_works_for_longer_than_a_stall_is_waited_for(model: Path) -> None:
    works_s = 1.5 * Limits().stall_s
    runners: list[ModelRunner] = []

    async def slow(up: Up, send: Send) -> None:
        await anext(up)
        await send(pb.AttemptDown(admitted=pb.Admitted()))
        await send(pb.AttemptDown(ready=pb.Ready()))
        await anext(up)
        until_s = time.monotonic() + works_s
        while time.monotonic() < until_s:
            runners[0]._pulse.count += 1  # what its engine does at each layer
            await asyncio.sleep(0.05)
        await send(pb.AttemptDown(complete=pb.Complete(first_token_id=17, reason="length")))

    async def test() -> None:
        async with cluster(model, Shape(in_front=lying(play=slow))) as running:
            runners.append(running.prefill_runner)
            assert await running.text(request_of(prompt_of(100), 1)) == (17,)
            assert running.decode.report().counters.get("attempts_failed", 0) == 0

    asyncio.run(test())
