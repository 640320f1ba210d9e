"""Real servers that are sent bytes which are no message, or sums that do not add up: one request ends, soon and by name; nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from kvlease.handoff.messages import Aborted, AbortReason, AttemptDown, AttemptUp
from kvlease.handoff.wire import decode_up
from kvlease.peering.channels import credentials, open_channel
from kvlease.peering.limits import Limits
from kvlease.v1 import kvlease_pb2 as pb
from tests.cluster.harness import SECRET, Cluster, Oracle, Shape, cluster, prompt_of, request_of
from tests.cluster.lying import lying

NO_MESSAGE = b"\xff\xff\xff"


def proposal_of(running: Cluster, num_tokens: int = 600) -> bytes:
    """A good one, in the name of the living pair."""
    pair = running.decode.peers.pairs[0]
    propose = pb.Propose(
        request_id="r",
        tenant="t",
        prompt_token_ids=prompt_of(num_tokens),
        max_tokens=5,
        sampling=pb.Sampling(top_p=1.0),
        remaining_ms=60_000,
        decode_incarnation=pair._party.incarnation,
        epoch=pair.epoch,
        fingerprint=pair._party.fingerprint,
    )
    return pb.AttemptUp(propose=propose).SerializeToString()


def second_proposal(running: Cluster) -> bytes:
    return proposal_of(running)


def no_message(_running: Cluster) -> bytes:
    return NO_MESSAGE


def foreign_grant(_running: Cluster) -> bytes:
    return pb.AttemptUp(grant=pb.Grant(lease_id=b"l", nonce=b"n", epoch=1)).SerializeToString()


def nothing(_running: Cluster) -> bytes:
    return b""


@pytest.mark.parametrize("then", [no_message, second_proposal, foreign_grant, nothing])
def test_nonsense_behind_a_proposal_ends_the_attempt_at_once_not_at_its_deadline(
    model: Path, oracle: Oracle, then: Callable[[Cluster], bytes]
) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            channel = open_channel(running.prefill.address, 4096, Limits())
            call: Any = channel.stream_stream("/kvlease.v1.Prefill/Attempt")(metadata=credentials(SECRET))
            await call.write(proposal_of(running))
            await call.read()
            await call.write(then(running))
            said = [pb.AttemptDown.FromString(data) async for data in _within(call, 5)]
            assert said[-1].WhichOneof("message") == "aborted", said
            assert said[-1].aborted.reason == AbortReason.PROTOCOL_ERROR
            assert await call.code() is grpc.StatusCode.OK
            await running.until_pools_are_full()
            assert await running.text(request_of(prompt_of(50))) == oracle.text(prompt_of(50), 8)
            await channel.close()

    asyncio.run(test())


async def _within(call: Any, within_s: float) -> Any:
    async with asyncio.timeout(within_s):
        with suppress(grpc.aio.AioRpcError):
            while (data := await call.read()) is not grpc.aio.EOF:
                yield data


@pytest.mark.parametrize(
    ("server", "method"), [("prefill", "Prefill/Pair"), ("prefill", "Prefill/Attempt"), ("decode", "Decode/Generate")]
)
def test_a_first_message_that_is_none_costs_its_caller_the_call_and_nobody_else_anything(
    model: Path, oracle: Oracle, server: str, method: str
) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            channel = open_channel(getattr(running, server).address, 4096, Limits())
            call: Any = channel.stream_stream(f"/kvlease.v1.{method}")(metadata=credentials(SECRET))
            await call.write(NO_MESSAGE)
            said = b"".join([data async for data in _within(call, 5)])
            assert b"corrupt" in said + (await call.details() or "").encode(), "it is told why"
            assert len(running.prefill.pairs.reports()) == 1
            assert running.decode.peers.pairs[0].is_ready
            assert await running.text(request_of(prompt_of(50))) == oracle.text(prompt_of(50), 8)
            await running.until_pools_are_full()
            await channel.close()

    asyncio.run(test())


def token_beyond(message: pb.AttemptDown) -> None:
    if message.WhichOneof("message") == "commit":
        message.commit.first_token_id = 2**32 - 1


def ends_for_no_reason(message: pb.AttemptDown) -> None:
    if message.WhichOneof("message") == "commit":
        message.complete.CopyFrom(pb.Complete(first_token_id=message.commit.first_token_id, reason="length"))


def status_of_a_success(message: pb.AttemptDown) -> None:
    if message.WhichOneof("message") == "admitted":
        message.rejected.CopyFrom(pb.Rejected(reason="queue_full", message="full", code="full", http_status=200))


@pytest.mark.parametrize(
    ("spoil", "reason", "named"),
    [
        (token_beyond, AbortReason.MANIFEST_MISMATCH, "4294967295"),
        (ends_for_no_reason, AbortReason.MANIFEST_MISMATCH, "no reason to"),
        (status_of_a_success, AbortReason.PROTOCOL_ERROR, "got 200"),
    ],
)
def test_a_prefill_server_that_does_not_add_up_gives_an_error_and_no_text(
    model: Path, spoil: Callable[[pb.AttemptDown], None], reason: AbortReason, named: str
) -> None:
    def spoiled(message: pb.AttemptDown) -> pb.AttemptDown:
        spoil(message)
        return message

    async def test() -> None:
        async with cluster(model, Shape(in_front=lying(spoiled))) as running:
            (end,) = await running.events(request_of(prompt_of(100)))
            assert isinstance(end, Aborted)
            assert (end.reason, end.http_status) == (reason, 502)
            assert named in end.message
            await running.until_pools_are_full()

    asyncio.run(test())


def test_an_attempt_whose_listener_fails_ends_at_once(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            said: list[AttemptDown] = []

            async def messages() -> AsyncIterator[AttemptUp]:
                yield decode_up(pb.AttemptUp.FromString(proposal_of(running)))
                raise ZeroDivisionError("a fault of our own")

            async def send(message: AttemptDown) -> None:
                said.append(message)

            await asyncio.wait_for(running.prefill.service.serve(messages(), send), 5)
            end = said[-1]
            assert isinstance(end, Aborted)
            assert end.reason is AbortReason.ENGINE_FAILED
            assert "a fault of our own" in end.message
            await running.until_pools_are_full()

    asyncio.run(test())
