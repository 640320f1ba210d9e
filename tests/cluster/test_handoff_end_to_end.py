"""A prompt goes through a real pair: the text is the one-process text, whatever the shapes; nothing is left behind."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path

import grpc.aio
import pytest

from kvlease.handoff.messages import Aborted, Finished, FinishReason, Rejected, RejectReason, TenantId
from kvlease.handoff.wire import encode_request
from kvlease.peering.channels import credentials
from kvlease.v1 import kvlease_pb2 as pb
from tests.cluster.harness import SECRET, Oracle, Shape, cluster, prompt_of, request_of
from tests.waiting import until

LENGTHS = (1, 15, 16, 17, 160, 600)


@pytest.mark.parametrize(("sending", "receiving", "chunk"), [(16, 16, 512), (8, 32, 64), (32, 8, 512)])
def test_the_text_is_that_of_one_process(model: Path, oracle: Oracle, sending: int, receiving: int, chunk: int) -> None:
    shape = Shape(2048 // sending, 2048 // receiving, sending, receiving, chunk)

    async def test() -> None:
        async with cluster(model, shape) as running:
            for length in LENGTHS:
                prompt = prompt_of(length, length)
                assert await running.text(request_of(prompt)) == oracle.text(prompt, 8)
            texts = await asyncio.gather(*(running.text(request_of(prompt_of(n, n))) for n in LENGTHS))
            assert texts == [oracle.text(prompt_of(n, n), 8) for n in LENGTHS]
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_text_that_ends_with_its_first_token_costs_no_grant_and_no_transfer(model: Path, oracle: Oracle) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            prompt = prompt_of(100)
            (first,) = oracle.text(prompt, 1)
            assert await running.text(request_of(prompt, 1)) == (first,)
            events = await running.events(request_of(prompt, 8, end_token_ids=frozenset({first})))
            assert events == [Finished(FinishReason.STOP, 100, 1)]
            assert running.decode.peers.pairs[0].report().num_blocks == 0
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_prompt_of_several_chunks_that_ends_with_its_first_token_finishes_and_frees_all(
    model: Path, oracle: Oracle
) -> None:
    async def test() -> None:
        async with cluster(model, Shape(chunk_tokens=32)) as running:
            prompt = prompt_of(100)
            (first,) = oracle.text(prompt, 1)
            assert await running.text(request_of(prompt, 1)) == (first,)
            assert running.decode.peers.pairs[0].report().num_blocks == 0, "one token is known to end it"
            events = await running.events(request_of(prompt, 8, end_token_ids=frozenset({first})))
            assert events == [Finished(FinishReason.STOP, 100, 1)]
            await running.until_pools_are_full()

    asyncio.run(test())


def test_prefills_verdict_reaches_the_client_unchanged_and_costs_nothing(model: Path) -> None:
    async def test() -> None:
        async with cluster(model, Shape(prefill_blocks=43, decode_blocks=128)) as running:
            assert running.decode.service.max_model_len == 688
            running.decode.peers.pairs[0].peer_capacity = 1024  # decode believes the pool larger than it is
            pulse, started = running.prefill_runner.pulse, time.monotonic()
            (verdict,) = await running.events(request_of(prompt_of(689)))
            assert time.monotonic() - started < 0.5
            assert isinstance(verdict, Rejected)
            assert (verdict.reason, verdict.code, verdict.http_status, verdict.param) == (
                RejectReason.PROMPT_TOO_LONG,
                "context_length_exceeded",
                400,
                "prompt",
            )
            assert "689" in verdict.message
            assert "688" in verdict.message
            assert running.prefill_runner.pulse == pulse
            assert running.decode.peers.pairs[0].report().num_blocks == 0
            assert running.pools_are_full()

    asyncio.run(test())


def test_decodes_door_refuses_what_could_never_fit(model: Path) -> None:
    async def test() -> None:
        async with cluster(model, Shape(prefill_blocks=128, decode_blocks=43)) as running:
            (too_long,) = await running.events(request_of(prompt_of(688)))
            (too_much,) = await running.events(request_of(prompt_of(600), 89))
            assert isinstance(too_long, Rejected)
            assert isinstance(too_much, Rejected)
            assert (too_long.param, too_much.param) == ("prompt", "max_tokens")
            assert await running.text(request_of(prompt_of(600), 8))

    asyncio.run(test())


def test_500_mixed_requests_with_a_third_cancelled_leave_both_pools_full(model: Path, oracle: Oracle) -> None:
    draw = random.Random(7)

    async def test() -> None:
        async with cluster(model) as running:
            prompts = [prompt_of(draw.choice((3, 16, 40, 130)), seed) for seed in range(12)]
            wrong: list[object] = []

            async def one(number: int) -> None:
                prompt, length = draw.choice(prompts), draw.choice((1, 2, 6))
                request = request_of(prompt, length, tenant=TenantId(f"t{number % 2}"), remaining_s=120.0)
                if number % 3:
                    found = await running.text(request)
                    if found != oracle.text(prompt, length):
                        wrong.append((number, found))
                    return
                call = running.stub.Generate(encode_request(request), metadata=credentials(SECRET))
                await asyncio.sleep(draw.random() * 0.3)  # the moment of the cancel is what varies
                call.cancel()

            for first in range(0, 500, 50):
                await asyncio.gather(*(one(number) for number in range(first, first + 50)))
            assert not wrong
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_deadline_ends_the_request_and_frees_everything(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            busy = [asyncio.create_task(running.text(request_of(prompt_of(600, n), 40))) for n in range(6)]
            await until(lambda: running.prefill.queue.num_begun > 0, within_s=5, what="prefill is busy")
            started = time.monotonic()
            events = await running.events(request_of(prompt_of(900), 64, remaining_s=0.05))
            assert time.monotonic() - started < 1.05
            assert isinstance(events[-1], Aborted)
            assert events[-1].http_status == 504
            await asyncio.gather(*busy)
            await running.until_pools_are_full()

    asyncio.run(test())


def test_without_the_secret_every_method_answers_unauthenticated(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            for metadata in ((), credentials("another")):
                with pytest.raises(grpc.aio.AioRpcError) as status:
                    await running.stub.Status(pb.StatusRequest(), metadata=metadata)
                call = running.stub.Generate(encode_request(request_of(prompt_of(3))), metadata=metadata)
                with pytest.raises(grpc.aio.AioRpcError) as generate:
                    await call.read()
                for caught in (status, generate):
                    assert caught.value.code() is grpc.StatusCode.UNAUTHENTICATED
            assert running.decode.report().counters == {}

    asyncio.run(test())
