"""A server listens at one address and is known to its peers by another, as in a container or behind a name."""

from __future__ import annotations

import asyncio
from pathlib import Path

from tests.cluster.harness import Oracle, Shape, cluster, prompt_of, request_of


def test_a_pair_meets_at_the_name_that_the_servers_advertise(model: Path, oracle: Oracle) -> None:
    async def test() -> None:
        async with cluster(model, Shape(advertise="localhost")) as running:
            assert running.prefill.address.startswith("localhost:")
            assert running.decode.address.startswith("localhost:")
            prompt = prompt_of(100)
            assert await running.text(request_of(prompt)) == oracle.text(prompt, 8)
            assert running.decode.report().pairs[0].num_blocks > 0
            assert running.prefill.report().pairs[0].peer_address == running.decode.address
            await running.until_pools_are_full()

    asyncio.run(test())
