"""Who is let in: two servers that cannot work together do not pair and say why in one line; nobody without the secret does anything."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from decode_server.app import RunningDecode
from decode_server.app import serving as serving_decode
from decode_server.config import DecodeConfig
from kvlease.handoff.limits import PROTOCOL_VERSION
from kvlease.handoff.messages import Rejected, RejectReason
from kvlease.handoff.wire import encode_request
from kvlease.kvcache.seal import SEAL_VERSION
from kvlease.models.tiny import make_tiny_model
from kvlease.peering.agreement import hello_of
from kvlease.peering.channels import credentials, open_channel
from kvlease.peering.limits import Limits
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc as rpc
from prefill_server.app import serving as serving_prefill
from prefill_server.config import PrefillConfig
from tests.cluster.harness import SECRET, Cluster, Shape, cluster, load, prompt_of, request_of
from tests.waiting import until
from transport.tcp.transport import TcpTransport


@asynccontextmanager
async def unequal(prefill: PrefillConfig, decode: DecodeConfig) -> AsyncIterator[RunningDecode]:
    """A decode server that tries to pair; pools of 43 blocks on prefill, 128 on decode."""
    sending, receiving = TcpTransport(SECRET), TcpTransport(SECRET)
    async with serving_prefill(prefill, load(prefill.model, 43), sending) as running:
        known = replace(decode, prefill_servers=(running.address,))
        async with serving_decode(known, load(decode.model, 128), receiving) as decoding:
            yield decoding
    await sending.close()
    await receiving.close()


def refusal_of(prefill: PrefillConfig, decode: DecodeConfig) -> str:
    """Why they do not pair."""

    async def find() -> str:
        async with unequal(prefill, decode) as running:
            (pair,) = running.peers.pairs
            await until(lambda: pair.state != "connecting", within_s=10, what="prefill has answered")
            assert pair.state == "refused"
            assert not pair.is_ready
            assert running.report().max_model_len == 0
            return pair.detail

    return asyncio.run(find())


def test_servers_with_other_weights_do_not_pair(model: Path, tmp_path: Path) -> None:
    other = make_tiny_model(tmp_path / "other", seed=1)
    detail = refusal_of(PrefillConfig(model, SECRET), DecodeConfig(other, SECRET, ()))
    assert "the same layout, other weights" in detail
    assert "--model" in detail


def test_servers_with_other_layouts_do_not_pair_and_both_are_named(model: Path, tmp_path: Path) -> None:
    deeper = make_tiny_model(tmp_path / "deeper", layers=3)
    detail = refusal_of(PrefillConfig(model, SECRET), DecodeConfig(deeper, SECRET, ()))
    assert "decode 3 layers" in detail
    assert "prefill 2 layers" in detail


def test_pools_below_an_explicit_max_model_len_do_not_pair_whoever_asks_for_it(model: Path) -> None:
    for prefill_len, decode_len in ((1024, 0), (0, 1024)):
        detail = refusal_of(
            PrefillConfig(model, SECRET, max_model_len=prefill_len),
            DecodeConfig(model, SECRET, (), max_model_len=decode_len),
        )
        assert "--max-model-len 1024" in detail
        assert "decode holds 2048 tokens, prefill 688" in detail


def test_a_ring_larger_than_prefill_allows_is_refused_with_both_sizes(model: Path) -> None:
    detail = refusal_of(
        PrefillConfig(model, SECRET, ring_bytes=1 << 20), DecodeConfig(model, SECRET, (), ring_bytes=8 << 20)
    )
    assert "prefill allows 1048576" in detail
    assert "decode wants a ring of 83" in detail  # 8 MiB, rounded down to whole slots
    assert "--ring-bytes" in detail


def protocol(hello: pb.PairHello) -> None:
    hello.protocol_version = 99


def seal(hello: pb.PairHello) -> None:
    hello.seal_version = 98


def transport(hello: pb.PairHello) -> None:
    hello.transport = "pigeon"


def no_block(hello: pb.PairHello) -> None:
    hello.block_size = 0


def huge_block(hello: pb.PairHello) -> None:
    hello.block_size = 2**32 - 1


@pytest.mark.parametrize(
    ("spoil", "named"),
    [
        (protocol, ("99", str(PROTOCOL_VERSION), "release")),
        (seal, ("98", str(SEAL_VERSION), "release")),
        (transport, ("pigeon", "tcp", "--transport")),
        (no_block, ("blocks of 0 tokens", "1 to 2048")),
        (huge_block, ("blocks of 4294967295 tokens", "1 to 2048")),
    ],
)
def test_a_hello_that_does_not_fit_is_refused_and_leaves_nothing(
    model: Path, spoil: Callable[[pb.PairHello], None], named: tuple[str, ...]
) -> None:
    async def test() -> None:
        async with cluster(model) as running, stub_of(running) as stub:
            hello = hello_of(running.decode.peers.pairs[0]._party, b"no offer")
            spoil(hello)
            call = stub.Pair(metadata=credentials(SECRET))
            await call.write(pb.PairUp(hello=hello))
            answer = await call.read()
            assert isinstance(answer, pb.PairDown)
            assert answer.WhichOneof("message") == "refused"
            assert all(part in answer.refused.message for part in named), answer.refused.message
            assert "\n" not in answer.refused.message
            assert len(running.prefill.pairs.reports()) == 1, "only the true pair lives"

    asyncio.run(test())


@asynccontextmanager
async def stub_of(running: Cluster) -> AsyncIterator[Any]:
    """A stranger's way to prefill."""
    channel = open_channel(running.prefill.address, 4096, Limits())
    yield rpc.PrefillStub(channel)
    await channel.close()


def test_without_a_pair_a_request_is_rejected_with_503(model: Path) -> None:
    async def test() -> None:
        async with unequal(
            PrefillConfig(model, SECRET, max_model_len=1024), DecodeConfig(model, SECRET, ())
        ) as running:
            channel = open_channel(running.address, 4096, Limits())
            call = rpc.DecodeStub(channel).Generate(
                encode_request(request_of(prompt_of(3))), metadata=credentials(SECRET)
            )
            events = [message async for message in call]
            await channel.close()
            assert len(events) == 1
            assert events[0].rejected.http_status == 503
            assert events[0].rejected.reason == RejectReason.NO_PREFILL

    asyncio.run(test())


@pytest.mark.parametrize("metadata", [(), credentials("another"), credentials("")], ids=["none", "wrong", "empty"])
def test_without_the_secret_no_method_of_prefill_does_anything(model: Path, metadata: Any) -> None:
    async def test() -> None:
        async with cluster(model) as running, stub_of(running) as stub:
            pulse, counters = running.prefill_runner.pulse, running.prefill.report().counters
            hello = hello_of(running.decode.peers.pairs[0]._party, b"no offer")
            refused = []
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await stub.Status(pb.StatusRequest(), metadata=metadata)
            refused.append(caught.value.code())
            for method, message in (
                (stub.Pair, pb.PairUp(hello=hello)),
                (stub.Attempt, pb.AttemptUp(propose=pb.Propose(prompt_token_ids=[1, 2]))),
            ):
                refused.append(await asyncio.wait_for(method(metadata=metadata).code(), 5))
                speaking = method(metadata=metadata)
                with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # the refusal may be faster
                    await speaking.write(message)
                assert await speaking.code() is not grpc.StatusCode.OK
            assert refused == [grpc.StatusCode.UNAUTHENTICATED] * 3
            assert len(running.prefill.pairs.reports()) == 1
            assert running.prefill.report().counters == counters
            assert running.prefill_runner.pulse == pulse
            assert running.pools_are_full()

    asyncio.run(test())


def test_a_full_queue_is_a_503_and_the_others_go_on(model: Path) -> None:
    async def test() -> None:
        async with cluster(model, Shape(max_queue=2)) as running:
            results = await asyncio.gather(*(running.events(request_of(prompt_of(600, n), 4)) for n in range(12)))
            ends = [events[-1] for events in results]
            rejections = [end for end in ends if isinstance(end, Rejected)]
            assert 0 < len(rejections) < 12
            assert {(end.reason, end.http_status, end.code) for end in rejections} == {
                (RejectReason.QUEUE_FULL, 503, "overloaded")
            }
            await running.until_pools_are_full()

    asyncio.run(test())
