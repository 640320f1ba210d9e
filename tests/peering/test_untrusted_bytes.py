"""A hello, an answer and a heartbeat of any bytes: a refusal that names the fault, or a pair; never a crash, and nothing stays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any, cast

import grpc.aio
import pytest
from google.protobuf.message import DecodeError
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.handoff.messages import Incarnation
from kvlease.handoff.wire import WireError
from kvlease.peering.agreement import Party, disagreement, hello_of, malformed, unfit
from kvlease.peering.attempt_stream import AttemptStream
from kvlease.peering.channels import credentials, make_server, open_channel
from kvlease.peering.heartbeat import Beat
from kvlease.peering.incoming import IncomingPair, IncomingPairs
from kvlease.peering.limits import Limits
from kvlease.peering.outgoing import OutgoingPair
from kvlease.v1 import kvlease_pb2 as pb
from kvlease.v1 import kvlease_pb2_grpc as rpc
from tests.waiting import until
from transport.contract import Landing, RingGeometry
from transport.tcp import TcpTransport

SEALED_BYTES = 1024
DECODE = Party(
    "127.0.0.1:1", Incarnation(b"d" * 16), b"f" * 16, "2 layers", 2048, 1024, 0, 16, 8 << 10, SEALED_BYTES, "tcp"
)
PREFILL = Party(
    "127.0.0.1:2", Incarnation(b"p" * 16), b"f" * 16, "2 layers", 1024, 1024, 0, 16, 8 << 10, SEALED_BYTES, "tcp"
)


def sealed_bytes(block_size: int) -> int:
    """Of a layout of 48 bytes a token."""
    return 256 + -(-block_size * 48 // 64) * 64


@dataclass
class Stream:
    """A call as its handler sees it: says what it was given, then lives on until it is told to end."""

    given: list[Any]
    said: list[pb.PairDown] = field(default_factory=list)
    over: asyncio.Event = field(default_factory=asyncio.Event)

    async def messages(self) -> AsyncIterator[pb.PairUp]:
        for each in self.given:
            if isinstance(each, Exception):
                raise each
            yield each
        await self.over.wait()

    async def write(self, message: pb.PairDown) -> None:
        self.said.append(message)


def pairs_over(transport: TcpTransport, *, party: Party = PREFILL) -> IncomingPairs:
    async def depart(_pair: IncomingPair) -> None:
        await asyncio.Event().wait()

    return IncomingPairs(party, sealed_bytes, transport, lambda: Beat(0, is_busy=False), depart)


async def spoken(*given: Any, changes: dict[str, Any] | None = None) -> list[pb.PairDown]:
    """What prefill answers to a good hello with these changes and what follows it; nothing may stay behind."""
    receiving, sending = TcpTransport("s"), TcpTransport("s")
    landing = await receiving.open_landing(RingGeometry(SEALED_BYTES, 8))
    hello = hello_of(DECODE, landing.offer)
    for name, value in (changes or {}).items():
        setattr(hello, name, value)
    stream, pairs = (
        Stream([pb.PairUp(hello=hello), *given] if changes is not None else list(given)),
        pairs_over(sending),
    )
    serving = asyncio.create_task(pairs.serve(stream.messages(), cast("Any", stream)))
    await until(lambda: bool(stream.said) or serving.done(), what="an answer")
    if stream.said and stream.said[0].WhichOneof("message") == "answer":
        await landing.establish(stream.said[0].answer.answer)
        await until(lambda: bool(pairs.reports()) or serving.done(), what="the pair lives")
        if not given:
            stream.over.set()
    await asyncio.wait_for(serving, 1.5)  # before silence alone would end it; raises what the handler raised
    assert pairs.reports() == []
    assert pairs.find(DECODE.incarnation) is None
    await landing.close()
    await sending.close()
    await receiving.close()
    return stream.said


def refusal_of(*given: Any, **changes: Any) -> str:
    (answer,) = asyncio.run(spoken(*given, changes=changes))
    assert answer.WhichOneof("message") == "refused", answer
    message = answer.refused.message
    assert message.isprintable(), message
    assert len(message) < 600, "short enough to be read, whatever was sent"
    return message


def test_the_double_alone_pairs() -> None:
    first, *_ = asyncio.run(spoken(changes={}))
    assert first.answer.num_slots == 8


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"ring_bytes": SEALED_BYTES - 1}, f"ring of {SEALED_BYTES - 1} bytes, but a sealed block has {SEALED_BYTES}"),
        ({"ring_bytes": 0}, "ring of 0 bytes"),
        ({"incarnation": b""}, "incarnation has 0 bytes"),
        ({"incarnation": b"d" * 17}, "incarnation has 17 bytes"),
        ({"fingerprint": b""}, "fingerprint has 0 bytes"),
        ({"address": ""}, "address is empty"),
        ({"address": "a\n\x1b[2J"}, "address is empty, longer than 300 characters, or not printable"),
        ({"address": "a" * 301}, "address"),
        ({"transport": "x" * 10_000}, "transport"),
        ({"layout": "x" * 10_000}, "layout"),
        ({"offer": bytes(5000)}, "offer has 5000 bytes, at most 4096"),
        ({"offer": b"short"}, "an offer has 50 bytes, this one 5"),
        ({"block_size": 1025}, "1 to 1024"),
        ({"pool_tokens": 15}, "pool of 15 tokens holds no block of 16"),
        ({"block_size": 32}, "the landing side has"),
    ],
)
def test_a_hello_that_makes_no_sense_is_refused_by_name(changes: dict[str, Any], named: str) -> None:
    assert named in refusal_of(**changes)


def test_a_block_larger_than_any_is_refused_though_the_pool_would_hold_it() -> None:
    hello = hello_of(DECODE, b"")
    hello.block_size, hello.pool_tokens = 5000, 2**40
    assert (
        malformed(hello, replace(PREFILL, pool_tokens=2**40), Limits())
        == "decode seals blocks of 5000 tokens, prefill sends 1 to 4096"
    )


hellos = st.fixed_dictionaries(
    {},
    optional={
        "protocol_version": st.integers(0, 2**32 - 1),
        "address": st.text(max_size=400),
        "incarnation": st.binary(max_size=20),
        "fingerprint": st.binary(max_size=20),
        "layout": st.text(max_size=50),
        "pool_tokens": st.integers(0, 2**64 - 1),
        "max_model_len": st.integers(0, 2**64 - 1),
        "transport": st.text(max_size=20),
        "offer": st.binary(max_size=100),
        "ring_bytes": st.integers(0, 2**64 - 1) | st.integers(0, 10_000),
        "block_size": st.integers(0, 2**32 - 1) | st.integers(0, 64),
    },
)


@settings(max_examples=150, deadline=None)
@given(hellos)
def test_any_hello_is_answered_and_leaves_nothing(changes: dict[str, Any]) -> None:
    first, *_ = asyncio.run(spoken(changes=changes))
    assert first.WhichOneof("message") in ("answer", "refused")


@given(hellos, st.integers(0, 2**64 - 1))
def test_what_is_accepted_fits_both(changes: dict[str, Any], ring_bytes: int) -> None:
    hello = hello_of(DECODE, b"")
    for name, value in (changes | {"ring_bytes": ring_bytes}).items():
        setattr(hello, name, value)
    if malformed(hello, PREFILL, Limits()) is not None:
        return
    sealed = sealed_bytes(hello.block_size)
    if disagreement(hello, PREFILL, sealed) is None:
        assert sealed <= hello.ring_bytes <= max(PREFILL.ring_bytes, 2 * sealed)
        assert hello.max_model_len <= min(hello.pool_tokens, PREFILL.pool_tokens)


@pytest.mark.parametrize(
    "first",
    [pb.PairUp(), pb.PairUp(heartbeat=pb.Heartbeat()), DecodeError("corrupt")],
    ids=["nothing", "a beat", "no message"],
)
def test_a_pair_that_does_not_begin_with_a_hello_is_refused(first: Any) -> None:
    (answer,) = asyncio.run(spoken(first))
    assert "first message" in answer.refused.message


@pytest.mark.parametrize(
    "then",
    [pb.PairUp(), pb.PairUp(hello=hello_of(DECODE, b"")), DecodeError("corrupt")],
    ids=["nothing", "a second hello", "no message"],
)
def test_what_is_no_heartbeat_ends_a_pair(then: Any) -> None:
    assert asyncio.run(spoken(then, changes={}))[0].WhichOneof("message") == "answer"


def good_answer() -> pb.PairAnswer:
    geometry = DECODE.geometry
    return pb.PairAnswer(
        incarnation=PREFILL.incarnation,
        pool_tokens=1024,
        max_model_len=1024,
        epoch=7,
        answer=b"a",
        block_size=DECODE.block_size,
        num_slots=geometry.num_slots,
        slot_bytes=geometry.slot_bytes,
    )


@pytest.mark.parametrize(
    ("field_name", "value"),
    [
        ("incarnation", b""),
        ("max_model_len", 0),
        ("epoch", 0),
        ("block_size", 17),
        ("num_slots", 0),
        ("slot_bytes", 64),
    ],
)
def test_an_answer_that_could_serve_nothing_makes_no_pair(field_name: str, value: Any) -> None:
    answer = good_answer()
    assert unfit(answer, DECODE) is None
    setattr(answer, field_name, value)
    assert unfit(answer, DECODE) is not None


@dataclass
class Speaker(rpc.PrefillServicer):
    """A prefill server that says these to every pair, and then only listens."""

    says: list[Any]

    async def Pair(self, request_iterator: Any, context: Any) -> None:  # type: ignore[override]  # noqa: N802
        for message in self.says:
            await context.write(message)
        async for _ in request_iterator:
            await context.write(pb.PairDown(heartbeat=pb.Heartbeat()))

    def Attempt(self, request_iterator: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError

    def Status(self, request: Any, context: Any) -> Any:  # noqa: N802
        raise NotImplementedError


@asynccontextmanager
async def listening(says: list[Any], limits: Limits) -> AsyncIterator[str]:
    server = make_server("s", 64, limits)
    rpc.add_PrefillServicer_to_server(Speaker(says), server)
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    yield address
    await server.stop(0)


@pytest.mark.parametrize(
    ("said", "state", "named"),
    [
        (pb.PairDown(), "refused", "something else than an answer"),
        (pb.PairDown(heartbeat=pb.Heartbeat(pulse=1)), "refused", "something else than an answer"),
        (pb.PairDown(answer=pb.PairAnswer()), "refused", "incarnation has 0 bytes"),
        (pb.PairDown(answer=good_answer()), "connecting", "answer of 1 bytes"),
    ],
    ids=["nothing", "a beat", "an empty answer", "an answer that leads nowhere"],
)
def test_decode_pairs_with_no_one_who_answers_nonsense(said: Any, state: str, named: str) -> None:
    async def test() -> None:
        async def land(_pair: OutgoingPair, _landing: Landing) -> None:
            await asyncio.Event().wait()

        transport = TcpTransport("s")
        async with listening([said], Limits()) as address:
            pair = OutgoingPair(address, DECODE, "s", transport, lambda: Beat(0, is_busy=False), land)
            keeping = asyncio.create_task(pair.keep())
            await until(lambda: bool(pair.detail), what="the answer was judged")
            assert (pair.state, pair.is_ready) == (state, False)
            assert named in pair.detail, pair.detail
            keeping.cancel()
            await asyncio.wait([keeping])
        await transport.close()

    asyncio.run(test())


def test_calls_beyond_the_bound_are_told_so_and_the_others_go_on() -> None:
    async def test() -> None:
        async with listening([pb.PairDown()], Limits(max_calls=3)) as address:
            channel = open_channel(address, 64, Limits())
            stub: Any = rpc.PrefillStub(channel)
            calls = [stub.Pair(metadata=credentials("s")) for _ in range(3)]
            for call in calls:
                assert isinstance(await call.read(), pb.PairDown)
            assert await stub.Pair(metadata=credentials("s")).code() is grpc.StatusCode.RESOURCE_EXHAUSTED
            await calls[0].write(pb.PairUp())
            assert isinstance(await calls[0].read(), pb.PairDown)
            await channel.close()

    asyncio.run(test())


def test_bytes_that_are_no_message_end_an_attempts_stream_by_name() -> None:
    async def junk(_stream: Any, context: Any) -> None:
        await context.write(b"\xff\xff\xff")

    async def test() -> None:
        server = make_server("s", 64, Limits())
        handlers: dict[str, Any] = {"Attempt": grpc.stream_stream_rpc_method_handler(junk)}
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvlease.v1.Prefill", handlers),))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        channel = open_channel(f"127.0.0.1:{port}", 64, Limits())
        stub: Any = rpc.PrefillStub(channel)
        stream = AttemptStream(stub.Attempt(metadata=credentials("s")))
        with pytest.raises(WireError, match="no message"):
            _ = [message async for message in stream.messages()]
        stream.cancel()
        await channel.close()
        await server.stop(0)

    asyncio.run(test())
