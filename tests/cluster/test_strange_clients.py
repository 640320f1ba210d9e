"""Clients of decode's own door that name requests alike, leave early, or come when nothing else happens."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from pathlib import Path

from kvlease.handoff.messages import GenerationEvent, RequestId
from kvlease.handoff.wire import encode_request
from kvlease.peering.channels import credentials
from tests.cluster.harness import SECRET, Oracle, Shape, cluster, prompt_of, request_of
from tests.waiting import until


def test_two_requests_with_one_id_are_two_requests(model: Path, oracle: Oracle) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            prompts = [prompt_of(100, n) for n in range(4)]
            requests = [replace(request_of(prompt), request_id=RequestId("the same")) for prompt in prompts]
            texts = await asyncio.gather(*(running.text(request) for request in requests))
            assert list(texts) == [oracle.text(prompt, 8) for prompt in prompts]
            await running.until_pools_are_full()

    asyncio.run(test())


def test_a_client_that_leaves_a_long_prompt_holds_up_nobody(model: Path, oracle: Oracle) -> None:
    async def test() -> None:
        async with cluster(model, Shape(chunk_tokens=16)) as running:
            long = request_of(prompt_of(1000), remaining_s=60.0)
            call = running.stub.Generate(encode_request(long), metadata=credentials(SECRET))
            await until(lambda: running.prefill.queue.num_begun == 1, what="it is being computed")
            call.cancel()
            await until(lambda: running.prefill.queue.num_begun == 0, within_s=1.0, what="it is not any more")
            await running.until_pools_are_full()
            pulse = running.prefill_runner.pulse
            num_layers = len(running.prefill_runner.storage.layout.layers)
            assert pulse < num_layers * 1000 / 16 / 2, "not even half of it was computed"
            assert await running.text(request_of(prompt_of(3), 2)) == oracle.text(prompt_of(3), 2)
            # The chunk that ran at the cancel may have ended after it was looked at.
            assert running.prefill_runner.pulse - pulse <= 2 * num_layers, "nothing of the long prompt was computed"

    asyncio.run(test())


def test_an_idle_pair_answers_at_once(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            await running.text(request_of(prompt_of(20), 1))  # the first one pays for warm caches
            waits_s = []
            for n in range(5):
                began = time.monotonic()
                await running.text(request_of(prompt_of(20, n), 2))
                waits_s.append(time.monotonic() - began)
            # Far below a heartbeat: no step of the handoff waits for a timer. The median, since the machine may be busy.
            assert sorted(waits_s)[2] < 0.25, waits_s

    asyncio.run(test())


def test_a_client_that_reads_nothing_holds_no_memory_once_its_text_has_ended(model: Path) -> None:
    async def test() -> None:
        async with cluster(model) as running:
            is_reading = asyncio.Event()

            async def read_nothing(_event: GenerationEvent) -> None:
                await is_reading.wait()

            request = request_of(prompt_of(40), 64, num_choices=3)
            serving = asyncio.create_task(running.decode.service.serve(request, read_nothing))
            await until(lambda: not running.pools_are_full(), within_s=10, what="the texts are being made")
            await until(running.pools_are_full, within_s=10, what="they have ended, and nothing of them is held")
            assert not serving.done()
            is_reading.set()
            await serving
            await running.until_pools_are_full()

    asyncio.run(test())
