"""What is said when a channel cannot be set up, and MTUs that differ, on a real device. Run by `tests/rdma/test_guest.py` in the guest."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from dataclasses import replace

import pytest

from tests.rdma.parts import GEOMETRY, SLOW, fill
from transport.errors import TransportRefused
from transport.rdma import DeviceChoice, open_rdma
from transport.rdma.transport import RdmaTransport
from transport.rdma.wire import Offer, unpack_offer


def test_the_smaller_mtu_of_both_ends_is_used() -> None:
    async def test(source: RdmaTransport, target: RdmaTransport) -> None:
        landing = await target.open_landing(GEOMETRY)
        departure, answer = await source.open_departure(GEOMETRY, landing.offer)
        await landing.establish(answer)
        await departure.ready()
        for number in range(2 * GEOMETRY.num_slots):
            slot = await departure.reserve()
            slot.memory[:] = fill(number)
            departure.send(slot, GEOMETRY.slot_bytes)
            arrived = await landing.receive()
            assert arrived.memory == fill(number)
            landing.release(arrived)
        await departure.close()
        await landing.close()

    for narrow_end in (0, 1):
        ends = open_rdma(DeviceChoice(), SLOW), open_rdma(DeviceChoice(), SLOW)
        ends[narrow_end].link = replace(ends[narrow_end].link, mtu=2)  # 512 bytes, where the port has 4096
        asyncio.run(test(*ends))


def test_a_peer_that_cannot_be_reached_is_refused_and_the_call_is_named() -> None:
    async def test() -> None:
        ours = open_rdma(DeviceChoice(), SLOW)
        landing = await ours.open_landing(GEOMETRY)
        offer = unpack_offer(landing.offer)
        assert isinstance(offer, Offer)
        assert offer.queue_pair.gid is not None
        nowhere = offer.queue_pair.gid[:-1] + bytes([offer.queue_pair.gid[-1] ^ 0x4D])  # a neighbour that is not there
        told = replace(offer, queue_pair=replace(offer.queue_pair, gid=nowhere))
        with pytest.raises(TransportRefused, match="rxe0.*ibv_modify_qp INIT->RTR"):
            await ours.open_departure(GEOMETRY, told.pack())
        await landing.close()
        await ours.close()

    asyncio.run(test())


def test_a_device_that_is_not_there_is_refused_with_those_that_are() -> None:
    with pytest.raises(TransportRefused, match=r"mlx9 is not among rxe0:1"):
        open_rdma(DeviceChoice("mlx9"))
    with pytest.raises(TransportRefused, match="no usable GID"):
        open_rdma(DeviceChoice("rxe0", 1, 99))


def test_a_limit_on_locked_memory_is_named_with_what_to_do() -> None:
    program = """
import asyncio
import os
import resource
from transport.contract import RingGeometry
from transport.errors import TransportRefused
from transport.rdma import DeviceChoice, open_rdma

async def main():
    try:
        await open_rdma(DeviceChoice()).open_landing(RingGeometry(1 << 20, 4))
    except TransportRefused as error:
        print(error)

asyncio.run(main())
"""
    # Root is not bound by the limit, unless it lacks this capability: so it is in containers.
    bound = ["setpriv", "--bounding-set", "-ipc_lock", "--inh-caps", "-ipc_lock", "prlimit", "--memlock=65536:65536"]
    done = subprocess.run([*bound, sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert "ibv_reg_mr of 4194304 bytes" in done.stdout
    assert "ulimit -l" in done.stdout


def test_a_process_with_thousands_of_descriptors_can_still_make_a_channel() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))

    async def test() -> None:
        ours = open_rdma(DeviceChoice(), SLOW)
        landing = await ours.open_landing(GEOMETRY)
        departure, answer = await ours.open_departure(GEOMETRY, landing.offer)
        await landing.establish(answer)
        await departure.ready()
        slot = await departure.reserve()
        slot.memory[:] = fill(1)
        departure.send(slot, GEOMETRY.slot_bytes)
        assert (await landing.receive()).memory == fill(1)
        await departure.close()
        await landing.close()
        await ours.close()

    taken = [os.open("/dev/null", os.O_RDONLY) for _ in range(1100)]
    try:
        asyncio.run(test())
    finally:
        for descriptor in taken:
            os.close(descriptor)
