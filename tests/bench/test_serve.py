"""`kvlease bench serve` against a scripted server of another make, and against a whole cluster of ours."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from kvlease.bench.errors import BenchFailed
from kvlease.bench.limits import Limits as ProcessLimits
from kvlease.bench.serve.answers import Sighting, refusal
from kvlease.bench.serve.client import Asking
from kvlease.bench.serve.exchange import Endpoint, EventLines
from kvlease.bench.serve.limits import Limits
from kvlease.bench.serve.load import LoadPlan, LoadSeen, Prompts, generate_load
from kvlease.bench.serve.report import facts_of, figures_of
from kvlease.bench.servers import server
from kvlease.cli.main import main
from kvlease.models.tiny import make_tiny_model

Writer = asyncio.StreamWriter
Script = Callable[[Writer, dict[str, object], int], Awaitable[None]]
QUICK = Asking("", timeout_s=1.0)
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(data: bytes) -> bytes:
    return f"{len(data):x}\r\n".encode() + data + b"\r\n"


def event(body: object) -> bytes:
    return b"data: " + json.dumps(body).encode() + b"\n\n"


def text_event(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}], "usage": None})


async def good(writer: Writer, body: dict[str, object], number: int) -> None:
    """Three texts, an empty one, usage of four tokens; cut at awkward places."""
    data = b"".join(map(text_event, ("a", "b", "", "c")))
    data += event({"choices": [], "usage": {"prompt_tokens": 20, "completion_tokens": 4}}) + b"data: [DONE]\n\n"
    writer.write(HEAD)
    for start in range(0, len(data), 37):
        writer.write(chunk(data[start : start + 37]))
        await writer.drain()
    writer.write(chunk(b""))


async def overloaded(writer: Writer, body: dict[str, object], number: int) -> None:
    answer = json.dumps({"error": {"code": "overloaded", "message": "later"}}).encode()
    writer.write(b"HTTP/1.1 503 Busy\r\nContent-Length: %d\r\n\r\n" % len(answer) + answer)


async def error_event(writer: Writer, body: dict[str, object], number: int) -> None:
    writer.write(HEAD + chunk(text_event("a")) + chunk(event({"error": {"code": "peer_lost"}})) + chunk(b""))


async def cut(writer: Writer, body: dict[str, object], number: int) -> None:
    writer.write(HEAD + chunk(text_event("a")))


async def silent(writer: Writer, body: dict[str, object], number: int) -> None:
    writer.write(HEAD + chunk(b"data: [DONE]\n\n") + chunk(b""))


async def endless(writer: Writer, body: dict[str, object], number: int) -> None:
    writer.write(HEAD)
    await writer.drain()
    await asyncio.Event().wait()


@asynccontextmanager
async def scripted(script: Script, bodies: list[dict[str, object]]) -> AsyncIterator[str]:
    """Answers the two warm-ups well, and everything after them by the script."""

    async def answer(reader: asyncio.StreamReader, writer: Writer) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(head.lower().split("content-length: ")[1].split("\r\n")[0])
        data = await reader.readexactly(length)
        if head.startswith("GET /v1/models "):
            found = b'{"data": [{"id": "other"}]}'
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(found) + found)
        else:
            bodies.append(json.loads(data))
            number = len(bodies) - 2
            await (good if number <= 0 else script)(writer, bodies[-1], number)
        await writer.drain()
        writer.close()

    listener = await asyncio.start_server(answer, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
    finally:
        listener.close()


def loaded(
    script: Script, asking: Asking = QUICK, duration_s: float = 0.0
) -> tuple[LoadPlan, LoadSeen, list[dict[str, object]]]:
    bodies: list[dict[str, object]] = []

    async def run() -> tuple[LoadPlan, LoadSeen]:
        async with scripted(script, bodies) as url:
            plan = LoadPlan(replace(asking, url=url), 3, 7, 20, duration_s=duration_s)
            return plan, await generate_load(plan, Limits(), lambda: None)

    plan, seen = asyncio.run(run())
    return plan, seen, bodies[2:]


def test_a_server_of_another_make_is_measured() -> None:
    plan, seen, bodies = loaded(good)
    facts = facts_of(plan, seen)
    assert (facts["model"], facts["requests"], facts["good"], facts["errors"]) == ("other", 7, 7, {})
    assert (facts["prompt tokens"], facts["generated tokens"]) == ("20", "4")
    counts = {figure.name: len(figure.samples) for figure in figures_of(seen)}
    assert counts == {
        "first token": 7,
        "between tokens": 14,
        "longest gap of a request": 7,
        "per token after the first": 7,
        "whole request": 7,
    }
    assert len({str(body["prompt"]) for body in bodies}) == 7
    assert all("ignore_eos" not in body and body["stream_options"] == {"include_usage": True} for body in bodies)


def test_a_chat_is_asked_as_a_chat() -> None:
    _, seen, bodies = loaded(good, Asking("", chat=True, ignore_eos=True))
    assert len(seen.sightings) == 7
    assert all(body["messages"] and body["ignore_eos"] is True and "prompt" not in body for body in bodies)


@pytest.mark.parametrize(
    ("script", "kind"),
    [
        (overloaded, "HTTP 503: overloaded"),
        (error_event, "error event: peer_lost"),
        (cut, "the connection ended in the middle of the answer"),
        (silent, "no text"),
        (endless, "timeout"),
    ],
)
def test_errors_are_counted_by_kind_and_are_in_no_figure(script: Script, kind: str) -> None:
    plan, seen, _ = loaded(script)
    assert facts_of(plan, seen)["errors"] == {kind: 7}
    assert facts_of(plan, seen)["generated tokens a second"] == 0
    assert all(not figure.samples for figure in figures_of(seen))


def test_no_request_begins_after_the_duration() -> None:
    _, seen, _ = loaded(good, duration_s=1e-9)
    assert not seen.sightings


def test_nobody_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "http://127.0.0.1:9"]) == 1
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://host", ""])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(BenchFailed):
        Endpoint.of(url)


def test_a_path_and_a_key_are_kept() -> None:
    endpoint = Endpoint.of("http://host:80/openai/v1/", "secret")
    head = endpoint.head("POST", "/completions", 3).decode()
    assert head.startswith("POST /openai/v1/completions HTTP/1.1\r\nHost: host:80\r\n")
    assert "\r\nAuthorization: Bearer secret\r\n" in head


def test_events_are_the_same_however_they_are_cut() -> None:
    data = b": hello\n\ndata: {}\r\n\r\nevent: x\ndata: 1\ndata: 2\n\ndata: [DONE]\n\n"
    for size in range(1, len(data)):
        lines = EventLines()
        found = [found for start in range(0, len(data), size) for found in lines.feed(data[start : start + size])]
        assert found == [b"{}", b"1\n2", b"[DONE]"], size


def test_tokens_are_counted_by_the_server_where_it_counts() -> None:
    seen = Sighting(1.0, [2.0, 3.0, 5.0], 5.0)
    assert (seen.num_tokens, seen.first_token_s, seen.gaps_s, seen.per_token_s) == (3, 1.0, [1.0, 2.0], 1.5)
    seen.num_counted_tokens = 7
    assert (seen.num_tokens, seen.per_token_s) == (7, 0.5)


@pytest.mark.parametrize("data", [b"{", b"[]", b'{"error": "bad"}'])
def test_an_event_that_is_none_ends_the_answer_as_an_error(data: bytes) -> None:
    seen = Sighting(0.0)
    assert seen.take(data, 1.0)
    assert seen.error


def test_a_refusal_is_named_by_its_code_if_it_has_one() -> None:
    assert refusal(502, b"<html>") == "HTTP 502"
    assert refusal(400, b'{"error": {"type": "bad_request"}}') == "HTTP 400: bad_request"


def test_prompts_differ_and_learn_their_length() -> None:
    prompts = Prompts(1, 100, 1.0)
    texts = [prompts.next() for _ in range(5)]
    assert len(set(texts)) == 5
    prompts.correct(200)
    assert len(prompts.next().split()) < 0.6 * len(texts[0].split())


@pytest.mark.slow
def test_our_own_cluster_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = make_tiny_model(tmp_path / "tiny")

    async def run() -> int:
        flags = ("--model", str(model), "--port", "0", "--prefill-blocks", "128", "--decode-blocks", "128")
        async with server("serve", flags, ProcessLimits()) as served:
            words = [
                "bench",
                "serve",
                served.where,
                "--json",
                "--requests",
                "12",
                "--max-tokens",
                "8",
                "--prompt-tokens",
                "40",
            ]
            return await asyncio.to_thread(main, words)

    assert asyncio.run(run()) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["facts"]["good"], report["facts"]["errors"]) == (12, {})
    assert report["facts"]["generated tokens"] == "8"
    assert report["facts"]["generated tokens a second"] > 1
    assert {figure["samples"] for figure in report["figures"]} >= {12}
