"""The whole handoff over RDMA: a prefill and a decode server with a toy engine, cancelled at random. Run by `scripts/prove`.

`CANCELS` requests (200 unless told) are cancelled among 8 that run at any time; the others must not notice.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from contextlib import suppress
from pathlib import Path
from random import Random

import grpc.aio
import pytest

from kvlease.handoff.wire import encode_request
from kvlease.models.tiny import make_tiny_model
from kvlease.peering.channels import credentials
from tests.cluster.harness import SECRET, Cluster, Shape, cluster, prompt_of, request_of
from tests.cluster.toy import ToyRunner, toy_text
from tests.rdma.machine import rdma_instead

NUM_CANCELS = int(os.environ.get("CANCELS", "200"))
NUM_AT_ONCE = 8
PROMPT_TOKENS = (5, 16, 40, 90)
MAX_TOKENS = 6


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tiny"))


def counted(running: Cluster) -> Counter[str]:
    """What both servers count."""
    return Counter(running.prefill.report().counters) + Counter(running.decode.report().counters)


async def cancelled(running: Cluster, random: Random) -> None:
    """A request whose client leaves at some moment."""
    prompt = prompt_of(random.choice(PROMPT_TOKENS), seed=random.randrange(1 << 30))
    call = running.stub.Generate(
        encode_request(request_of(prompt, 40, remaining_s=300.0)), metadata=credentials(SECRET)
    )
    await asyncio.sleep(random.uniform(0, 0.5))
    call.cancel()
    with suppress(asyncio.CancelledError, grpc.aio.AioRpcError):
        await call.read()


async def worker(running: Cluster, seed: int, quota: list[int]) -> int:
    """Ask for texts and cancel some, until the quota of cancels is used up; how many texts came."""
    random, num_texts = Random(seed), 0
    while quota[0] > 0:
        if random.random() < 0.5:
            quota[0] -= 1
            await cancelled(running, random)
            continue
        prompt = prompt_of(random.choice(PROMPT_TOKENS), seed=random.randrange(3))
        text = await running.text(request_of(prompt, MAX_TOKENS, remaining_s=300.0))
        assert text == toy_text(prompt, MAX_TOKENS)
        num_texts += 1
    return num_texts


def test_random_cancels_cost_the_others_no_error_and_no_retry(model: Path) -> None:
    async def test() -> None:
        async with cluster(
            model, Shape(make_runner=ToyRunner.make, wrap_prefill=rdma_instead, wrap_decode=rdma_instead)
        ) as running:
            (pair,) = running.decode.report().pairs
            assert pair.transport == "rdma"
            quota = [NUM_CANCELS]
            num_texts = sum(await asyncio.gather(*(worker(running, seed, quota) for seed in range(NUM_AT_ONCE))))
            assert num_texts > 0
            counters = counted(running)
            assert not [
                name for name in counters if name.startswith(("attempts_failed", "blocks_refused", "seals_refused"))
            ]
            assert counters["requests_finished_length"] >= num_texts
            assert running.decode.report().pairs[0].epoch == pair.epoch, "the pair was made again"
            await running.until_pools_are_full()
            print(f"figures: {NUM_CANCELS} cancels among {NUM_AT_ONCE} requests, {num_texts} texts right, no retry")

    asyncio.run(test())
