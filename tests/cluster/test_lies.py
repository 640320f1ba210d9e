"""A prefill server that says what is not so: no lie about an attempt makes unproven memory readable."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from kvlease.handoff.messages import Aborted, AbortReason
from kvlease.kvcache.seal import SEAL_BYTES
from kvlease.v1 import kvlease_pb2 as pb
from tests.cluster.harness import Oracle, Shape, cluster, prompt_of, request_of
from tests.cluster.lying import Play, lying
from tests.cluster.tampering import TamperedTransport
from tests.cluster.test_incident import fill_with_an_earlier_tenant
from transport.memory import FaultPlan, MemoryHub, MemoryTransport

PROMPT = prompt_of(100, 5)


def commit_in_place_of_a_transfer(num_blocks: int, num_tokens: int) -> Play:
    """Whatever is proposed is admitted, and "done" as soon as it is granted."""

    async def play(up: AsyncIterator[pb.AttemptUp], send: Callable[[pb.AttemptDown], Awaitable[None]]) -> None:
        await anext(up)
        await send(pb.AttemptDown(admitted=pb.Admitted()))
        await send(pb.AttemptDown(ready=pb.Ready()))
        await anext(up)
        commit = pb.Commit(num_blocks=num_blocks, num_tokens=num_tokens, first_token_id=17)
        await send(pb.AttemptDown(commit=commit))
        async for _ in up:
            pass

    return play


@pytest.mark.parametrize(
    ("play", "reason"),
    [
        (commit_in_place_of_a_transfer(1, 1), AbortReason.MANIFEST_MISMATCH),
        (commit_in_place_of_a_transfer(44, 1), AbortReason.MANIFEST_MISMATCH),
        (commit_in_place_of_a_transfer(44, 690), AbortReason.PEER_STALLED),
    ],
    ids=["one token", "all blocks, one token", "a manifest without blocks"],
)
def test_a_one_token_transfer_in_place_of_the_verdict_is_refused(model: Path, play: Play, reason: AbortReason) -> None:
    async def test() -> None:
        async with cluster(model, Shape(prefill_blocks=43, in_front=lying(play=play))) as running:
            fill_with_an_earlier_tenant(running)
            running.decode.peers.pairs[0].peer_capacity = 1024  # decode believes the pool larger than it is
            pulse = running.decode_runner.pulse
            (end,) = await running.events(request_of(prompt_of(690)))
            assert isinstance(end, Aborted)
            assert end.reason is reason
            assert 500 <= end.http_status < 600
            assert running.decode_runner.pulse == pulse, "nothing was computed from what was there"
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_short_manifest_after_a_whole_transfer_is_refused(model: Path) -> None:
    def shorten(message: pb.AttemptDown) -> pb.AttemptDown:
        if message.WhichOneof("message") == "commit":
            message.commit.num_tokens -= 1
        return message

    async def test() -> None:
        async with cluster(model, Shape(in_front=lying(shorten))) as running:
            fill_with_an_earlier_tenant(running)
            (end,) = await running.events(request_of(PROMPT))
            assert isinstance(end, Aborted)
            assert (end.reason, end.http_status) == (AbortReason.MANIFEST_MISMATCH, 502)
            assert "99" in end.message
            assert "100" in end.message
            await running.until_pools_are_full()

    asyncio.run(test())


def test_the_double_alone_changes_nothing(model: Path, oracle: Oracle) -> None:
    async def test() -> None:
        async with cluster(model, Shape(in_front=lying())) as running:
            assert await running.text(request_of(PROMPT)) == oracle.text(PROMPT, 8)

    asyncio.run(test())


def test_a_block_of_an_earlier_grant_is_a_stranger(model: Path, oracle: Oracle) -> None:
    kept: list[bytearray] = []

    def replay(number: int, block: bytearray) -> bytearray:
        kept.append(bytearray(block))
        return kept[2] if number == 9 else block  # a prompt has seven blocks: number 9 is the second one's third

    async def test() -> None:
        async with cluster(model, Shape(wrap_prefill=lambda inner: TamperedTransport(inner, replay))) as running:
            assert await running.text(request_of(PROMPT)) == oracle.text(PROMPT, 8)
            fill_with_an_earlier_tenant(running)
            assert await running.text(request_of(PROMPT)) == oracle.text(PROMPT, 8)  # by a second attempt
            counters = running.decode.report().counters
            assert counters["blocks_without_lease"] == 1
            assert counters["attempts_failed"] == 1
            await running.until_pools_are_full()

    asyncio.run(test())


@pytest.mark.parametrize(
    "plan",
    [
        FaultPlan(),
        FaultPlan(seed=3, delay_s=(0.0, 0.002)),
        FaultPlan(seed=3, stray_rate=0.03, duplicate_rate=0.02, truncate_rate=0.02),
        FaultPlan(seed=3, stray_rate=0.2, stray_delay_s=(0.0, 0.002)),
    ],
    ids=["no fault", "slow", "lies", "late strays"],
)
def test_over_a_wire_that_lies_a_text_is_right_or_there_is_none(model: Path, oracle: Oracle, plan: FaultPlan) -> None:
    hub = MemoryHub(plan)

    async def test() -> None:
        shape = Shape(wrap_prefill=lambda _: MemoryTransport(hub), wrap_decode=lambda _: MemoryTransport(hub))
        async with cluster(model, shape) as running:
            fill_with_an_earlier_tenant(running)
            prompts = [prompt_of(20 + 9 * n, n) for n in range(20)]
            results = await asyncio.gather(*(running.events(request_of(prompt)) for prompt in prompts))
            num_right = 0
            for prompt, events in zip(prompts, results, strict=True):
                if isinstance(events[-1], Aborted):
                    assert len(events) == 1
                    assert plan.stray_rate > 0
                    continue
                assert tuple(t for e in events[:-1] for t in getattr(e, "token_ids", ())) == oracle.text(prompt, 8)
                num_right += 1
            assert num_right >= (5 if plan.stray_rate else len(prompts))
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_text_never_differs_where_the_earlier_tenants_bytes_are_plausible(model: Path, oracle: Oracle) -> None:
    def spoil_content(number: int, block: bytearray) -> bytearray:
        if number % 6 == 5:
            block[SEAL_BYTES:] = bytes(len(block) - SEAL_BYTES)
        return block

    async def test() -> None:
        async with cluster(model, Shape(wrap_prefill=lambda inner: TamperedTransport(inner, spoil_content))) as running:
            storage = running.decode_runner.storage
            for layer in range(len(storage.layout.layers)):
                for name in ("k", "v"):
                    storage.array(layer, name).fill_(0.37)
            for seed in range(12):
                prompt = prompt_of(33 + seed, seed)
                events = await running.events(request_of(prompt))
                tokens = tuple(t for e in events[:-1] for t in getattr(e, "token_ids", ()))
                assert tokens in ((), oracle.text(prompt, 8))
            assert running.decode.report().counters["blocks_refused_digest"] > 0
            await running.until_pools_are_full()

    asyncio.run(test())
