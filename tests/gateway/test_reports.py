"""Readiness, status, metrics and the one log line a request."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gateway.cluster import ServerFacts
from kvlease.handoff.messages import FinishReason
from kvlease.models.tokenizer import Tokenizer
from kvlease.telemetry.logs import capture_events
from tests.gateway.serving import (
    LOST,
    QUICK,
    FakeDecode,
    FakeServer,
    Running,
    decode_facts,
    ends_with,
    goes_silent,
    on_loop,
    prefill_facts,
    says,
    serving,
)
from tests.gateway.sockets import connected
from tests.waiting import until


async def ready_status(running: Running) -> int:
    return (await running.http.get("/ready")).status_code


@on_loop
async def test_nothing_is_ready_before_a_prompt_went_through(tiny: Path) -> None:
    decode = FakeDecode(decode_facts(), warm_up_script=ends_with(LOST))
    async with serving(tiny, decode, is_ready=False) as running:
        await until(lambda: len(decode.warm_ups) > 2, what="it is tried again")
        assert await ready_status(running) == 503
        assert (await running.http.get("/health")).status_code == 200
        decode.warm_up_script = says([1, 2], FinishReason.LENGTH)
        await until(running.gateway.warm_up.can_serve)
        answer = await running.http.get("/ready")
    assert answer.status_code == 200
    assert answer.json()["pairs"][0]["transport"] == "tcp"
    request = decode.warm_ups[-1]
    assert request.max_tokens == 2  # one token would need no transfer
    assert request.end_token_ids == frozenset()
    assert request.prefill_candidates == ("prefill:1",)


@on_loop
async def test_ready_only_while_a_pair_can_serve(tiny: Path) -> None:
    async with serving(tiny) as running:
        view = running.gateway.cluster.decode[0]
        running.decode[0].facts = decode_facts(max_model_len=0)
        await until(lambda: not view.can_serve)
        assert await ready_status(running) == 503
        refused = await running.complete()
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "no_server")
        assert refused.headers["retry-after"] == "1"
        running.decode[0].facts = decode_facts()
        await until(lambda: view.can_serve)
        assert await ready_status(running) == 200
        assert len(running.decode[0].warm_ups) == 1


@on_loop
async def test_a_restarted_server_is_warmed_again(tiny: Path) -> None:
    async with serving(tiny) as running:
        decode = running.decode[0]
        decode.warm_up_script = goes_silent()
        decode.facts = decode_facts(incarnation="11" * 16)
        await until(lambda: len(decode.warm_ups) == 2)
        assert await ready_status(running) == 503
    async with serving(tiny) as running:
        running.decode[0].facts = decode_facts(incarnation="11" * 16)
        await until(lambda: len(running.decode[0].warm_ups) == 2)
        await until(running.gateway.warm_up.can_serve)
        assert await ready_status(running) == 200


@on_loop
async def test_a_warm_up_that_hangs_is_given_up(tiny: Path) -> None:
    decode = FakeDecode(decode_facts(), warm_up_script=goes_silent())
    limits = replace(QUICK, warm_up_timeout_s=0.05)
    async with serving(tiny, decode, is_ready=False, limits=limits) as running:
        await until(lambda: len(decode.warm_ups) > 1)
        assert await ready_status(running) == 503


@on_loop
async def test_a_lost_server_is_out_after_three_polls_and_another_takes_over(tiny: Path) -> None:
    servers = [FakeDecode(decode_facts(f"decode:{n}"), script=says([5])) for n in range(2)]
    async with serving(tiny, *servers) as running:
        await until(lambda: all(view.can_serve for view in running.gateway.cluster.decode))
        servers[0].facts = None
        await until(lambda: not running.gateway.cluster.decode[0].is_in)
        answers = await asyncio.gather(*(running.complete() for _ in range(4)))
    assert [answer.status_code for answer in answers] == [200] * 4
    assert not servers[0].requests


@on_loop
async def test_a_poll_that_hangs_is_lost_and_others_go_on(tiny: Path) -> None:
    class Hanging(FakeServer):
        is_hanging = False

        async def status(self) -> ServerFacts | None:
            if self.is_hanging:
                await asyncio.Event().wait()
            return self.facts

    servers = [Hanging(prefill_facts("prefill:9")), FakeServer(prefill_facts())]
    async with serving(tiny, prefill=servers, limits=replace(QUICK, poll_timeout_s=0.05)) as running:
        hanging, answering = running.gateway.cluster.prefill
        await until(lambda: hanging.is_in and answering.is_in)
        servers[0].is_hanging = True  # type: ignore[attr-defined]
        await until(lambda: not hanging.is_in)
        assert answering.is_in


@on_loop
async def test_status_names_every_server(tiny: Path) -> None:
    silent = FakeServer(None, "prefill:9")
    busy = FakeServer(prefill_facts(num_queued=3, counters={"refused_digest": 2}))
    async with serving(tiny, prefill=[busy, silent]) as running:
        await until(lambda: running.gateway.cluster.prefill[0].is_in)
        servers = (await running.http.get("/status")).json()["servers"]
    assert [(s["role"], s["address"], s["is_in"]) for s in servers] == [
        ("decode", "decode:1", True),
        ("prefill", "prefill:1", True),
        ("prefill", "prefill:9", False),
    ]
    assert servers[0]["pairs"][0]["transport"] == "tcp"
    assert servers[1]["num_queued"] == 3
    assert servers[1]["counters"] == {"refused_digest": 2}
    assert servers[1]["blocks"] == {"free": 128, "reserved": 0, "filling": 0, "readable": 0, "total": 128}


async def metrics(running: Running) -> dict[str, float]:
    text = (await running.http.get("/metrics")).text
    return {key: float(value) for key, value in re.findall(r"^([^#\s]\S*) (\S+)$", text, re.MULTILINE)}


@on_loop
async def test_metrics_count_what_happened(tiny: Path, tokenizer: Tokenizer) -> None:
    decode = FakeDecode(decode_facts(counters={"refused_digest": 4}), script=says(tokenizer.encode("abc", False)))
    async with serving(tiny, decode) as running:
        await running.complete()
        await running.complete(stream=True)
        await running.complete(max_tokens=-1)
        found = await metrics(running)
    num_prompt, num_answer = len(tokenizer.encode("hello", True)), len(tokenizer.encode("abc", False)) + 1
    assert found['kvlease_requests_total{api="completions",outcome="stop",status="200"}'] == 2
    assert found['kvlease_requests_total{api="completions",outcome="invalid_value",status="400"}'] == 1
    assert found['kvlease_request_errors_total{code="invalid_value"}'] == 1
    assert found["kvlease_requests_in_flight"] == 0
    assert found["kvlease_prompt_tokens_total"] == 2 * num_prompt
    assert found["kvlease_generated_tokens_total"] == 2 * num_answer
    assert found["kvlease_time_to_first_token_seconds_count"] == 2
    assert found["kvlease_time_between_tokens_seconds_count"] == 2 * (num_answer - 2)
    assert found['kvlease_server_up{role="decode",server="decode:1"}'] == 1
    assert found['kvlease_server_blocks{role="decode",server="decode:1",state="total"}'] == 128
    assert found['kvlease_server_events{event="refused_digest",role="decode",server="decode:1"}'] == 4
    assert found['kvlease_server_pairs{role="decode",server="decode:1",state="ready",transport="tcp"}'] == 1


@on_loop
async def test_one_line_a_request_and_no_word_of_it(tiny: Path, tokenizer: Tokenizer) -> None:
    decode = FakeDecode(decode_facts(), script=says(tokenizer.encode("a secret answer", False)))
    with capture_events() as captured:
        async with serving(tiny, decode) as running:
            answer = await running.complete(prompt="a secret question", max_tokens=100)
            await running.chat("a secret question", model="a secret model")
            async with connected(running.port) as wire:
                decode.script = goes_silent()
                await wire.post({"model": "tiny", "prompt": "a secret question"})
                await until(lambda: decode.num_open == 1)
                wire.leave()
                await running.until_quiet()
    lines = [event.fields for event in captured.named("request.finished")]
    assert [(line["status"], line["outcome"]) for line in lines] == [
        (200, "stop"),
        (404, "model_not_found"),
        (499, "client_left"),
    ]
    first = lines[0]
    assert first["request_id"] == answer.headers["x-request-id"]
    assert (first["tenant"], first["api"]) == ("default", "completions")
    assert first["prompt_tokens"] == len(tokenizer.encode("a secret question", True))
    assert first["output_tokens"] == len(tokenizer.encode("a secret answer", False)) + 1
    assert 0 <= float(str(first["ttft_ms"])) <= float(str(first["total_ms"]))
    assert "secret" not in repr(captured.events)


@pytest.mark.parametrize("path", ["/v1/models", "/health", "/ready", "/status", "/metrics"])
@on_loop
async def test_nothing_invites_other_origins(tiny: Path, path: str) -> None:
    async with serving(tiny) as running:
        answer = await running.http.get(path, headers={"origin": "http://elsewhere.test"})
        preflight = await running.http.options("/v1/completions", headers={"origin": "http://elsewhere.test"})
    assert not [name for name in (*answer.headers, *preflight.headers) if name.startswith("access-control")]
    assert "server" not in answer.headers
