"""Every request ends once: by its text, by an error, by its deadline, or because its client left."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Rejected,
    RejectReason,
    TokensGenerated,
)
from kvlease.models.tiny import make_tiny_model
from kvlease.models.tokenizer import Tokenizer
from tests.gateway.serving import (
    LOST,
    QUICK,
    FakeDecode,
    Script,
    decode_facts,
    ends_with,
    events_of,
    goes_silent,
    on_loop,
    says,
    serving,
)
from tests.gateway.sockets import connected
from tests.waiting import until

BODY = {"model": "tiny", "prompt": "hello"}
STALLED = Aborted(AbortReason.PEER_STALLED, "nothing for 2 s", "peer_stalled", 503, retryable=True)


def decode(script: Script, address: str = "decode:1") -> FakeDecode:
    return FakeDecode(decode_facts(address), script=script)


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_an_abort_before_the_first_token_has_a_status_of_its_own(tiny: Path, stream: bool) -> None:
    aborted = replace(STALLED, retryable=False)
    async with serving(tiny, decode(ends_with(aborted))) as running:
        answer = await running.complete(stream=stream)
    assert answer.status_code == 503
    assert answer.headers["retry-after"] == "1"
    assert answer.json()["error"]["code"] == "peer_stalled"


@on_loop
async def test_a_full_queue_says_when_to_come_back(tiny: Path) -> None:
    full = Rejected(RejectReason.QUEUE_FULL, "64 are waiting", "queue_full", 429)
    async with serving(tiny, decode(ends_with(full))) as running:
        answer = await running.complete()
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert answer.json()["error"] == {
        "message": "64 are waiting",
        "type": "rate_limit_error",
        "param": None,
        "code": "queue_full",
    }


@on_loop
async def test_after_the_first_token_an_abort_is_an_event_and_the_end(tiny: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny, decode(ends_with(STALLED, tokenizer.encode("ab", False)))) as running:
        answer = await running.complete(stream=True)
    *texts, error = [json.loads(event) for event in events_of(answer)]
    assert answer.status_code == 200
    assert "".join(text["choices"][0]["text"] for text in texts) == "ab"
    assert error["error"]["code"] == "peer_stalled"
    assert "event: error\n" in answer.text
    assert "[DONE]" not in answer.text


@on_loop
async def test_without_a_stream_an_abort_after_tokens_is_an_error(tiny: Path, tokenizer: Tokenizer) -> None:
    async with serving(tiny, decode(ends_with(STALLED, tokenizer.encode("ab", False)))) as running:
        answer = await running.complete()
        assert len(running.decode[0].requests) == 1
    assert answer.status_code == 503


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_lost_attempt_is_tried_once_on_another_server(tiny: Path, tokenizer: Tokenizer, stream: bool) -> None:
    good, bad = decode(says(tokenizer.encode("ok", False)), "decode:1"), decode(ends_with(LOST), "decode:2")
    async with serving(tiny, good, bad) as running:
        answers = [await running.complete(stream=stream) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 200]
        assert len(bad.requests) >= 1
        ids = [request.request_id for request in (*bad.requests, *good.requests)]
        assert len(set(ids)) == len(ids)


@on_loop
async def test_once_a_token_was_made_nothing_is_tried_again(tiny: Path) -> None:
    servers = [decode(ends_with(STALLED, [5]), f"decode:{n}") for n in range(2)]
    async with serving(tiny, *servers) as running:
        await until(lambda: all(server.can_serve for server in running.gateway.cluster.decode))
        answer = await running.complete()
        streamed = await running.complete(stream=True)
    assert answer.status_code == 503
    assert "peer_stalled" in streamed.text
    assert sum(len(server.requests) for server in servers) == 2


@on_loop
async def test_a_third_attempt_is_not_made(tiny: Path) -> None:
    servers = [decode(ends_with(STALLED), f"decode:{n}") for n in range(3)]
    async with serving(tiny, *servers) as running:
        await until(lambda: all(server.can_serve for server in running.gateway.cluster.decode))
        answer = await running.complete()
    assert answer.json()["error"]["code"] == "peer_stalled"
    assert sum(len(server.requests) for server in servers) == 2


@on_loop
async def test_a_stream_that_just_stops_is_an_error(tiny: Path) -> None:
    async def stops(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        yield TokensGenerated((5,))

    async with serving(tiny, decode(stops)) as running:
        whole = await running.complete()
        streamed = await running.complete(stream=True)
    assert whole.json()["error"]["code"] == "stream_ended_early"
    assert "stream_ended_early" in streamed.text
    assert "[DONE]" not in streamed.text


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_fault_of_ours_is_told_and_ends_nobody_else(tiny: Path, tokenizer: Tokenizer, stream: bool) -> None:
    async def raises(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        if request.max_tokens == 13:
            raise RuntimeError("a fault")
        yield TokensGenerated((5,))
        yield Finished(FinishReason.STOP, len(request.prompt_token_ids), 1)

    async with serving(tiny, decode(raises)) as running:
        bad, good = await asyncio.gather(running.complete(stream=stream, max_tokens=13), running.complete())
        await running.until_quiet()
    assert (bad.status_code, good.status_code) == (500, 200)
    assert bad.json()["error"]["code"] == "internal_error"
    assert "a fault" not in bad.text


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 1])
@on_loop
async def test_silence_ends_at_the_deadline(tiny: Path, tokenizer: Tokenizer, stream: bool, after: int) -> None:
    ids = tokenizer.encode("a", False)[:after]
    async with serving(tiny, decode(goes_silent(ids)), deadline_s=0.2) as running:
        answer = await running.complete(stream=stream)
        await running.until_quiet()
        assert running.decode[0].num_cancelled == 1
        assert 0.1 < running.decode[0].requests[0].remaining_s <= 0.2
    if stream and after:
        assert answer.status_code == 200
        assert json.loads(events_of(answer)[-1])["error"]["code"] == "deadline_exceeded"
    else:
        assert answer.status_code == 504
        assert answer.json()["error"]["code"] == "deadline_exceeded"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("after", [0, 3])
@on_loop
async def test_a_client_that_leaves_is_cancelled(tiny: Path, tokenizer: Tokenizer, stream: bool, after: int) -> None:
    ids = tokenizer.encode("abc", False)[:after]
    async with serving(tiny, decode(goes_silent(ids))) as running:
        async with connected(running.port) as wire:
            await wire.post({**BODY, "stream": stream})
            await until(lambda: running.decode[0].num_open == 1)
            if stream and after:
                while not (await wire.line()).startswith(b"data: "):
                    pass
            wire.leave()
            await running.until_quiet()
        assert running.decode[0].num_cancelled == 1


@on_loop
async def test_a_client_that_leaves_while_tokenizing_starts_nothing(tiny: Path) -> None:
    async with serving(tiny, decode(goes_silent())) as running:
        async with connected(running.port) as wire:
            await wire.post({**BODY, "prompt": "ab " * 900_000})
            wire.leave()
            await running.until_quiet()
        assert not running.decode[0].requests


@on_loop
async def test_a_client_that_reads_nothing_is_given_up_at_the_deadline(tmp_path: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("x" * 1000, False)
    roomy = make_tiny_model(tmp_path / "roomy", context_length=1 << 30)  # more than any socket buffers

    async def floods(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        while True:
            yield TokensGenerated(tuple(ids))
            await asyncio.sleep(0)

    flooding = FakeDecode(decode_facts(max_model_len=1 << 30), script=floods)
    limits = replace(QUICK, last_word_s=0.1)
    async with serving(roomy, flooding, limits=limits, deadline_s=0.5) as running:
        async with connected(running.port) as wire:
            await wire.post({**BODY, "stream": True, "max_tokens": 1 << 29})
            await until(lambda: running.decode[0].num_open == 1)
            await running.until_quiet()
        assert running.decode[0].num_cancelled == 1


@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_a_stop_string_ends_the_text_and_the_work(tiny: Path, tokenizer: Tokenizer, stream: bool) -> None:
    ids = tokenizer.encode("one two END three", False)
    async with serving(tiny, decode(goes_silent(ids))) as running:
        answer = await running.complete(stream=stream, stop=["END"], max_tokens=100)
        await running.until_quiet()
        assert running.decode[0].num_cancelled == 1
    if stream:
        *chunks, done = events_of(answer)
        choices = [json.loads(chunk)["choices"][0] for chunk in chunks]
        assert done == "[DONE]"
        assert "".join(choice["text"] for choice in choices) == "one two "
        assert choices[-1]["finish_reason"] == "stop"
    else:
        assert answer.json()["choices"][0]["text"] == "one two "
        assert answer.json()["choices"][0]["finish_reason"] == "stop"
        assert answer.json()["usage"]["completion_tokens"] == len(tokenizer.encode("one two END", False))


@on_loop
async def test_the_contexts_end_is_length(tiny: Path) -> None:
    async with serving(tiny, decode(says([5] * 2000))) as running:
        answer = await running.complete(prompt=[5] * 1020)
    assert answer.json()["choices"][0]["finish_reason"] == "length"
    assert answer.json()["usage"] == {"prompt_tokens": 1020, "completion_tokens": 4, "total_tokens": 1024}


@on_loop
async def test_streamed_and_whole_texts_are_equal(tiny: Path, tokenizer: Tokenizer) -> None:
    random = Random(7)
    async with serving(tiny, decode(says([]))) as running:
        for _ in range(40):
            text = "".join(random.choices("abz 🌧あ\n\u0301<|", k=random.randint(1, 15)))
            running.decode[0].script = says(tokenizer.encode(text, False), at_once=random.randint(1, 4))
            max_tokens = random.randint(1, 40)
            whole = await running.chat(max_tokens=max_tokens, stop=["z"])
            streamed = await running.chat(max_tokens=max_tokens, stop=["z"], stream=True)
            choice = whole.json()["choices"][0]
            chunks = [json.loads(event)["choices"][0] for event in events_of(streamed)[:-1]]
            assert "".join(chunk["delta"].get("content", "") for chunk in chunks) == choice["message"]["content"], text
            assert chunks[-1]["finish_reason"] == choice["finish_reason"], text


@on_loop
async def test_line_breaks_of_other_alphabets_stay_inside_their_event(tiny: Path, tokenizer: Tokenizer) -> None:
    text = "a\u2028b\u2029c\u0085d\r\ne\n\nf"
    async with serving(tiny, decode(says(tokenizer.encode(text, False)))) as running:
        answer = await running.complete(stream=True, max_tokens=100)
    assert not set("\u2028\u2029\u0085\r") & set(answer.text)
    chunks = [json.loads(event) for event in events_of(answer)[:-1]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == text


@on_loop
async def test_more_requests_than_allowed_are_refused_at_once(tiny: Path) -> None:
    async with serving(tiny, decode(goes_silent()), limits=replace(QUICK, max_in_flight=2)) as running:
        async with connected(running.port) as one, connected(running.port) as two:
            await one.post(BODY)
            await two.post(BODY)
            await until(lambda: running.decode[0].num_open == 2)
            answer = await running.complete()
            one.leave()
            two.leave()
            await running.until_quiet()
        running.decode[0].script = says([5])
        assert (await running.complete()).status_code == 200
    assert (answer.status_code, answer.json()["error"]["code"]) == (429, "gateway_busy")


@on_loop
async def test_what_is_open_when_the_gateway_stops_is_told_so(tiny: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("a", False)
    async with serving(tiny, decode(goes_silent(ids))) as running:
        whole = asyncio.create_task(running.complete())
        streamed = asyncio.create_task(running.complete(stream=True))
        await until(lambda: running.decode[0].num_open == 2)
        running.gateway.exchanges.is_draining = True
        late = await running.complete()
        running.gateway.exchanges.abort_all()
        answers = await asyncio.gather(whole, streamed)
        await running.until_quiet()
        assert running.decode[0].num_cancelled == 2
        assert (await running.http.get("/ready")).status_code == 503
    assert (late.status_code, late.json()["error"]["code"]) == (503, "draining")
    assert answers[0].status_code == 503
    assert '"code":"shutdown"' in answers[1].text or answers[1].status_code == 503


@on_loop
async def test_many_requests_of_which_some_leave_all_end(tiny: Path, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("the rain in spain", False)

    async def slowly(request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        for token_id in ids:
            await asyncio.sleep(0.001)
            yield TokensGenerated((token_id,))
        yield Finished(FinishReason.STOP, len(request.prompt_token_ids), len(ids) + 1)

    async with serving(tiny, decode(slowly)) as running:

        async def one(number: int) -> str:
            if number % 3:
                answer = await running.complete(stream=bool(number % 2))
                return "text" if "rain" in answer.text or "stop" in answer.text else answer.text
            async with connected(running.port) as wire:
                await wire.post({**BODY, "stream": bool(number % 2)})
                await asyncio.sleep(number % 7 / 1000)
                wire.leave()
            return "left"

        results = await asyncio.gather(*(one(number) for number in range(60)))
        await running.until_quiet()
        assert running.gateway.exchanges.bodies.num_held_bytes == 0
        assert running.gateway.exchanges.service.router.num_in_flight("decode:1") == 0
    assert set(results) == {"text", "left"}
