"""What the rdma transport decides without a device: which port and GID, what the bytes mean, which frames leave together."""

from __future__ import annotations

import subprocess
import sys
from collections import deque
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from transport.contract import RingGeometry
from transport.rdma.devices import DeviceChoice, Gid, GidType, Link, PortFacts, choose_link
from transport.rdma.runs import take_run
from transport.rdma.wire import (
    CREDIT,
    MESSAGE_BYTES,
    Message,
    Offer,
    QueuePairAddress,
    pack_answer,
    unpack_answer,
    unpack_message,
    unpack_offer,
)


def ipv4(last: int) -> bytes:
    return bytes(10) + b"\xff\xff" + bytes([10, 0, 0, last])


LINK_LOCAL = Gid(0, b"\xfe\x80" + bytes(13) + b"\x01", GidType.ROCE_V2)
ROUTED_V1 = Gid(1, ipv4(1), GidType.ROCE_V1)
GLOBAL_V6 = Gid(2, b"\x20\x01" + bytes(13) + b"\x01", GidType.ROCE_V2)
ROUTED_V2 = Gid(3, ipv4(1), GidType.ROCE_V2)
NOTHING = Gid(4, bytes(16), GidType.ROCE_V2)
PORT = PortFacts("mlx5_0", 1, "active", True, True, 0, 5, (LINK_LOCAL, ROUTED_V1, GLOBAL_V6, ROUTED_V2, NOTHING))
DOWN = replace(PORT, device="mlx5_1", state="down", is_active=False)
INFINIBAND = PortFacts(
    "mlx4_0", 2, "active", True, False, 17, 5, (Gid(0, b"\xfe\x80" + bytes(14), GidType.INFINIBAND),)
)


def chosen(ports: list[PortFacts], choice: DeviceChoice = DeviceChoice()) -> Link:  # noqa: B008 - a frozen value
    link = choose_link(ports, choice)
    assert isinstance(link, Link), link
    return link


def test_the_gid_is_the_one_that_can_be_routed_best() -> None:
    order = [ROUTED_V2, GLOBAL_V6, LINK_LOCAL, ROUTED_V1]
    for num_left in range(4, 0, -1):
        gids = tuple(sorted(order[-num_left:], key=lambda gid: gid.index))
        assert chosen([replace(PORT, gids=gids)]).gid == order[-num_left]


def test_a_port_that_is_down_is_passed_over_and_named_when_it_is_all_there_is() -> None:
    assert chosen([DOWN, PORT]).device == "mlx5_0"
    assert choose_link([DOWN], DeviceChoice()) == "no active port: mlx5_1:1 is down; bring its link up"


def test_the_operator_can_choose_device_port_and_gid() -> None:
    assert chosen([PORT, INFINIBAND], DeviceChoice.parse("mlx4_0")).device == "mlx4_0"
    gid = chosen([PORT], DeviceChoice.parse("mlx5_0:1:2")).gid
    assert gid == GLOBAL_V6
    assert "mlx9" in str(choose_link([PORT], DeviceChoice.parse("mlx9")))
    assert "no usable GID" in str(choose_link([PORT], DeviceChoice.parse("mlx5_0:1:9")))


def test_infiniband_needs_no_gid() -> None:
    link = chosen([INFINIBAND])
    assert (link.gid, link.lid, link.port) == (None, 17, 2)


def test_without_a_device_the_advice_is_how_to_get_one() -> None:
    assert "rdma link add" in str(choose_link([], DeviceChoice()))
    assert "IP address" in str(choose_link([replace(PORT, gids=(NOTHING,))], DeviceChoice()))


@pytest.mark.parametrize("text", [":", ":1", "a:b", "a:1:2:3", "a:-1", "a:", "a:1:"])
def test_a_malformed_choice_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="NAME"):
        DeviceChoice.parse(text)


@given(st.text("ab_0", min_size=1), st.none() | st.integers(0, 300), st.none() | st.integers(0, 300))
def test_a_choice_reads_back_as_it_was_written(name: str, port: int | None, gid_index: int | None) -> None:
    choice = DeviceChoice(name, port, gid_index if port is not None else None)
    assert DeviceChoice.parse(str(choice)) == choice


ADDRESSES = st.builds(
    QueuePairAddress,
    number=st.integers(1, (1 << 24) - 1),
    first_psn=st.integers(0, (1 << 24) - 1),
    lid=st.integers(0, 65535),
    mtu=st.integers(1, 5),
    gid=st.none() | st.binary(min_size=16, max_size=16).filter(any),
)
OFFERS = st.builds(
    Offer,
    geometry=st.builds(RingGeometry, st.integers(1, 1 << 20).map(lambda n: 64 * n), st.integers(1, 1 << 20)),
    queue_pair=ADDRESSES,
    ring_address=st.integers(0, 1 << 47),
    ring_key=st.integers(0, (1 << 32) - 1),
)


@given(OFFERS)
def test_an_offer_reads_back(offer: Offer) -> None:
    assert unpack_offer(offer.pack()) == offer


@given(ADDRESSES)
def test_an_answer_reads_back(address: QueuePairAddress) -> None:
    assert unpack_answer(pack_answer(address)) == address


@given(st.integers(0, (1 << 64) - 1))
def test_a_message_reads_back(number: int) -> None:
    data = Message(CREDIT, number).pack()
    assert len(data) == MESSAGE_BYTES
    assert unpack_message(memoryview(data)) == Message(CREDIT, number)


@given(OFFERS, st.integers(0), st.integers(1, 255))
def test_a_spoiled_offer_is_a_text_or_another_sound_offer(offer: Offer, position: int, change: int) -> None:
    data = bytearray(offer.pack())
    data[position % len(data)] ^= change
    read = unpack_offer(bytes(data))
    assert isinstance(read, str) or (read != offer and read.pack() == bytes(data))


@given(st.binary(max_size=200))
def test_any_bytes_are_an_offer_or_an_answer_or_a_text(data: bytes) -> None:
    offer, answer = unpack_offer(data), unpack_answer(data)
    assert isinstance(offer, str) or offer.pack() == data
    assert isinstance(answer, str) or pack_answer(answer) == data


@pytest.mark.parametrize(
    "address",
    [
        QueuePairAddress(0, 1, 0, 5, ipv4(1)),
        QueuePairAddress(1, 1 << 24, 0, 5, ipv4(1)),
        QueuePairAddress(1, 1, 0, 6, ipv4(1)),
        QueuePairAddress(1, 1, 0, 0, ipv4(1)),
        QueuePairAddress(1, 1, 0, 5, bytes(16)),
    ],
)
def test_an_impossible_queue_pair_is_refused(address: QueuePairAddress) -> None:
    assert isinstance(unpack_answer(pack_answer(address)), str)


SLOT = 1024


@given(
    st.lists(st.sampled_from([1, 64, SLOT - 1, SLOT, SLOT, SLOT]), min_size=1, max_size=40),
    st.integers(1, 8),
    st.integers(0, 9),
)
def test_runs_carry_every_frame_once_in_order_and_the_length_tells_them_apart(
    lengths: list[int], num_slots: int, first: int
) -> None:
    geometry = RingGeometry(SLOT, num_slots)
    waiting = deque((first + index, num_bytes) for index, num_bytes in enumerate(lengths))
    seen: list[int] = []
    while waiting:
        run = take_run(waiting, geometry, 4 * SLOT)
        assert run.first == first + len(seen)
        assert run.offset == run.first % num_slots * SLOT
        assert run.offset + run.num_bytes <= geometry.ring_bytes
        assert run.num_bytes <= 4 * SLOT
        num_whole, rest = divmod(run.num_bytes, SLOT)  # what the receiver makes of it
        told = [SLOT] * num_whole + [rest] * (rest > 0)
        assert len(told) == run.num_frames
        seen += told
    assert seen == lengths


def test_frames_in_neighbouring_slots_leave_together() -> None:
    waiting = deque([(2, SLOT), (3, SLOT), (4, SLOT), (5, 7), (6, SLOT)])
    assert take_run(waiting, RingGeometry(SLOT, 8), 1 << 20).num_frames == 4
    assert list(waiting) == [(6, SLOT)]


def test_the_package_can_be_imported_without_pyverbs_and_says_what_is_missing() -> None:
    program = """
import sys
sys.modules["pyverbs"] = None  # as if it were not installed
from transport.errors import TransportRefused
from transport.rdma import DeviceChoice, open_rdma
try:
    open_rdma(DeviceChoice())
except TransportRefused as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True)
    assert "python3-pyverbs" in done.stdout
