"""The tcp transport fed with any bytes: a fault that is named, no byte outside the slot that is due, no memory, no end of the door."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Coroutine
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.transport.channels import content, until
from transport.contract import Departure, RingGeometry
from transport.ends import ReceiveSide, SendSide
from transport.errors import ChannelBroken
from transport.limits import Limits
from transport.tcp import TcpTransport
from transport.tcp.channel import TcpLanding
from transport.tcp.streams import CreditReader, FrameReader, Reader
from transport.tcp.wire import (
    CREDIT,
    FRAME,
    HELLO_BYTES,
    MESSAGE_BYTES,
    PROBE,
    REPLY_BYTES,
    Answer,
    Hello,
    Message,
    pack_reply,
    prove,
    unpack_answer,
    unpack_hello,
    unpack_message,
    unpack_offer,
    unpack_reply,
)

RING = RingGeometry(slot_bytes=128, num_slots=4)
SECRET = b"a secret"
QUICK = Limits(establish_s=0.5, death_s=0.6, probe_s=0.1, max_pending_hellos=4)

numbers = st.integers(0, 2**64 - 1) | st.integers(0, 6)
kinds = st.sampled_from([FRAME, PROBE, CREDIT, bytes(8)])
headers = st.builds(lambda kind, num_bytes, number: Message(kind, num_bytes, number).pack(), kinds, numbers, numbers)
pieces = st.lists(headers | st.binary(max_size=40) | st.just(Message(PROBE, 0, 0).pack()), max_size=6)


def good_frames(sizes: list[int]) -> bytes:
    return b"".join(Message(FRAME, size, n).pack() + content(n, size) for n, size in enumerate(sizes))


def fed(reader: Reader, data: bytes, cuts: list[int]) -> str | None:
    """Give the reader `data` in these pieces, as a socket would; returns the fault."""
    sizes = iter(cuts)
    done = 0
    while done < len(data):
        num_left = min(next(sizes, len(data)), len(data) - done)
        num_put = 0
        for buffer in reader.buffers():
            part = data[done + num_put : done + num_left][: len(buffer)]
            buffer[: len(part)] = part
            num_put += len(part)
        assert num_put > 0, "a reader has always room"
        done += num_put
        fault = reader.filled(num_put)
        if fault is not None:
            return fault
    return None


@settings(max_examples=200)
@given(
    st.lists(st.integers(1, RING.slot_bytes), max_size=3),
    pieces,
    st.lists(st.integers(1, 70), max_size=40),
)
def test_any_bytes_on_the_landing_side_are_whole_frames_in_order_or_a_fault(
    sizes: list[int], junk: list[bytes], cuts: list[int]
) -> None:
    data = good_frames(sizes) + b"".join(junk)
    verdicts = []
    for chunks in (cuts, []):
        side = ReceiveSide(RING)
        ring = side.window
        slots = [side._ring.slot(n) for n in range(RING.num_slots)]
        fault = fed(FrameReader(side), data, chunks)
        verdicts.append((fault, ring.num_arrived, [bytes(slot) for slot in slots[: ring.num_arrived]]))
        assert len(sizes) <= ring.num_arrived <= RING.num_slots
        for n, size in enumerate(sizes):
            assert bytes(slots[n]) == content(n, size) + bytes(RING.slot_bytes - size)
        for slot in slots[ring.num_arrived + 1 :]:
            assert not any(slot), "only the slot that is due is ever written"
        assert fault is None or len(fault) < 300
        side.close()
    assert verdicts[0] == verdicts[1], "whatever the chunks"


@settings(max_examples=200)
@given(pieces, st.lists(st.integers(1, 70), max_size=40), st.integers(0, 4))
def test_any_bytes_on_the_departure_side_are_credits_for_what_was_sent_or_a_fault(
    junk: list[bytes], cuts: list[int], num_sent: int
) -> None:
    verdicts = []
    for chunks in (cuts, []):
        side = SendSide(RING)
        side.connect()
        for _ in range(num_sent):
            side.window.send(side.window.lend())
        side.window.transmit(num_sent)
        fault = fed(CreditReader(side), b"".join(junk), chunks)
        verdicts.append((fault, side.window.num_credited))
        assert 0 <= side.window.num_credited <= num_sent
        side.close()
    assert verdicts[0] == verdicts[1], "whatever the chunks"


@given(st.lists(st.integers(0, 5), max_size=6))
def test_credits_only_grow_and_never_beyond_what_was_sent(totals: list[int]) -> None:
    side = SendSide(RING)
    side.connect()
    for _ in range(3):
        side.window.send(side.window.lend())
    side.window.transmit(3)
    fault = fed(CreditReader(side), b"".join(Message(CREDIT, 0, total).pack() for total in totals), [])
    assert (fault is None) == (totals == sorted(totals) and max(totals, default=0) <= 3)
    side.close()


@pytest.mark.parametrize(
    "message",
    [
        Message(PROBE, 5, 0),
        Message(CREDIT, 0, 0),
        Message(FRAME, 0, 0),
        Message(FRAME, RING.slot_bytes + 1, 0),
        Message(FRAME, 2**64 - 1, 0),
        Message(FRAME, 8, 1),
    ],
)
def test_a_header_that_is_not_due_is_a_fault_before_a_byte_is_placed(message: Message) -> None:
    side = ReceiveSide(RING)
    assert fed(FrameReader(side), message.pack(), []) is not None
    assert not any(side._ring.slot(0))
    side.close()


@given(st.binary(max_size=400))
def test_any_bytes_are_an_offer_an_answer_a_hello_or_a_reason(data: bytes) -> None:
    for found in (unpack_offer(data), unpack_answer(data)):
        assert not isinstance(found, str) or 0 < len(found) < 700
    unpack_hello(data[:HELLO_BYTES].ljust(HELLO_BYTES, b"\0"))
    unpack_reply(data[:REPLY_BYTES].ljust(REPLY_BYTES, b"\0"))
    unpack_message(memoryview(data[:MESSAGE_BYTES].ljust(MESSAGE_BYTES, b"\0")))


def run(test: Coroutine[Any, Any, None]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(bounded())


async def stranger(port: int, data: bytes) -> socket.socket:
    """Connects and says this."""
    stream = socket.socket()
    stream.setblocking(False)
    loop = asyncio.get_running_loop()
    await loop.sock_connect(stream, ("127.0.0.1", port))
    await loop.sock_sendall(stream, data)
    return stream


async def is_sent_away(stream: socket.socket) -> bool:
    try:
        data = await asyncio.get_running_loop().sock_recv(stream, 1)
    except ConnectionError:
        data = b""
    stream.close()
    return data == b""


def test_strangers_are_sent_away_without_a_word_and_the_right_one_still_comes_in() -> None:
    async def test() -> None:
        sending, receiving = TcpTransport("a secret", limits=QUICK), TcpTransport("a secret", limits=QUICK)
        landing = await receiving.open_landing(RING)
        departure, answer = await sending.open_departure(RING, landing.offer)
        known = unpack_answer(answer)
        assert isinstance(known, Answer)
        forged = Hello(RING, known.token, bytes(32)).pack()
        other = Hello(RingGeometry(64, 1), known.token, bytes(32)).pack()
        no_token = Hello(RING, bytes(32), bytes(32)).pack()
        for data in (
            bytes(HELLO_BYTES),
            b"GET / HTTP/1.1\r\n".ljust(HELLO_BYTES),
            forged,
            other,
            no_token,
            b"\xff" * 5000,
        ):
            assert await is_sent_away(await stranger(known.port, data))
        assert dict(sending.refused_hellos) == {"malformed": 3, "proof": 1, "geometry": 1, "token": 1}
        await landing.establish(answer)
        await departure.ready()
        for end in (departure, landing, sending, receiving):
            await end.close()

    run(test())


def test_strangers_that_say_nothing_are_bounded_in_number_and_time() -> None:
    async def test() -> None:
        sending, receiving = TcpTransport("a secret", limits=QUICK), TcpTransport("a secret", limits=QUICK)
        landing = await receiving.open_landing(RING)
        departure, answer = await sending.open_departure(RING, landing.offer)
        known = unpack_answer(answer)
        assert isinstance(known, Answer)
        streams = [await stranger(known.port, b"k" * n) for n in range(20)]
        await until(lambda: sending.refused_hellos.get("crowded", 0) == 20 - QUICK.max_pending_hellos)
        await until(lambda: sending.refused_hellos.get("late", 0) == QUICK.max_pending_hellos)
        for stream in streams:
            assert await is_sent_away(stream)
        for end in (departure, landing, sending, receiving):
            await end.close()

    run(test())


@pytest.mark.parametrize(
    ("data", "named"),
    [
        (b"\xff" * MESSAGE_BYTES, "where a credit was due"),
        (Message(FRAME, 10, 0).pack(), "where a credit was due"),
        (Message(CREDIT, 0, 1).pack(), "credit for 1 frames, but only 0 were sent"),
        (Message(CREDIT, 0, 2**64 - 1).pack(), "credit for 18446744073709551615 frames"),
    ],
)
def test_a_proven_peer_that_breaks_the_protocol_loses_its_channel_by_name(data: bytes, named: str) -> None:
    async def test() -> None:
        sending, receiving = TcpTransport("a secret", limits=QUICK), TcpTransport("a secret", limits=QUICK)
        landing = await receiving.open_landing(RING)
        departure, answer = await sending.open_departure(RING, landing.offer)
        known, offer = unpack_answer(answer), unpack_offer(landing.offer)
        assert isinstance(known, Answer)
        assert not isinstance(offer, str)
        proof = prove(SECRET, b"landing", known.token, offer.challenge, RING)
        stream = await stranger(known.port, Hello(RING, known.token, proof).pack())
        await departure.ready()
        await asyncio.get_running_loop().sock_sendall(stream, data)
        with pytest.raises(ChannelBroken, match=named):
            await until_broken(departure)
        stream.close()
        for end in (departure, landing, sending, receiving):
            await end.close()

    run(test())


async def until_broken(departure: Departure) -> None:
    while True:
        departure.give_back(await departure.reserve())
        await asyncio.sleep(0)


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (b"", "refused the hello"),
        (b"\xff" * REPLY_BYTES, "begins with"),
        (pack_reply(bytes(32)), "could not prove"),
        (b"kvlr", "refused the hello"),
    ],
    ids=["nothing", "junk", "no proof", "half a reply"],
)
def test_who_answers_at_the_right_place_without_proof_reaches_no_ring(said: bytes, named: str) -> None:
    async def test() -> None:
        async def impostor(_reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            writer.write(said)
            writer.write_eof()
            await writer.drain()

        server = await asyncio.start_server(impostor, "127.0.0.1", 0)
        port: int = server.sockets[0].getsockname()[1]
        landing = TcpLanding(RING, SECRET, QUICK)
        with pytest.raises(ChannelBroken, match=named):
            await landing.establish(Answer("127.0.0.1", port, bytes(32)).pack())
        assert landing.statistics().num_frames == 0
        await landing.close()
        server.close()

    run(test())
