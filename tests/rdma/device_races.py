"""A few of the races of `tests/rdma/prove_races.py`, so that the tests would see it if a close were no longer final."""

from __future__ import annotations

import asyncio

from tests.rdma.prove_races import AFTER, LIMITS, load, race
from transport.rdma import DeviceChoice, open_rdma

NUM_RACES = 30


def test_no_byte_lands_after_close_on_a_loaded_machine() -> None:
    async def test() -> None:
        transport = open_rdma(DeviceChoice(), LIMITS)
        kept = [await race(transport, seed) for seed in range(NUM_RACES)]
        assert all(view == AFTER for views in kept for view in views)
        await transport.close()

    with load(1):
        asyncio.run(test())
