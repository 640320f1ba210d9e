"""Whatever is sent, the answer is a 4xx in OpenAI's shape, at once, and nothing reaches a decode server."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.gateway.serving import QUICK, on_loop, serving
from tests.gateway.sockets import connected
from tests.waiting import until

SMALL = replace(QUICK, max_body_bytes=10_000, max_held_body_bytes=25_000)
GOOD = {"model": "tiny", "prompt": "hello"}


def check(body: Any, code: str) -> None:
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert body["error"]["message"]


@pytest.mark.parametrize(
    ("content", "status", "code"),
    [
        (b"{", 400, "invalid_json"),
        (b"", 400, "invalid_json"),
        (b'{"model": "tiny", "prompt": "\xff"}', 400, "invalid_json"),
        (b'{"model": "tiny", "prompt": "\\ud800"}', 400, "invalid_json"),
        (b"[" * 5000, 400, "invalid_json"),
        (b'{"model": "tiny", "prompt": "x", "temperature": NaN}', 400, "invalid_json"),
        (b'{"model": "other", "prompt": "x"}', 404, "model_not_found"),
        (b'{"model": "tiny", "prompt": ""}', 400, "invalid_value"),
        (b'{"model": "tiny", "prompt": "x", "max_tokens": 1024}', 400, "context_length_exceeded"),
        (b'{"model": "tiny", "prompt": "x", "n": 99}', 400, "invalid_value"),
    ],
)
@on_loop
async def test_a_bad_body(tiny: Path, content: bytes, status: int, code: str) -> None:
    async with serving(tiny) as running:
        answer = await running.http.post(
            "/v1/completions", content=content, headers={"content-type": "application/json"}
        )
        assert not running.decode[0].requests
    assert answer.status_code == status
    check(answer.json(), code)


@on_loop
async def test_a_long_text_is_refused_by_its_bytes_at_once(tiny: Path) -> None:
    async with serving(tiny) as running:
        started_at = asyncio.get_running_loop().time()
        answer = await running.complete(prompt="the rain " * 120_000)
        took_s = asyncio.get_running_loop().time() - started_at
    assert answer.status_code == 400
    check(answer.json(), "context_length_exceeded")
    assert took_s < 1.0


@pytest.mark.parametrize(
    "content_type", ["", "text/plain", "application/x-www-form-urlencoded", "application/json; charset=latin-1"]
)
@on_loop
async def test_another_content_type(tiny: Path, content_type: str) -> None:
    async with serving(tiny) as running:
        headers = {"content-type": content_type} if content_type else {}
        answer = await running.http.post("/v1/completions", content=json.dumps(GOOD).encode(), headers=headers)
    assert answer.status_code == 415
    check(answer.json(), "unsupported_media_type")


@on_loop
async def test_a_charset_of_utf_8_is_json_too(tiny: Path) -> None:
    async with serving(tiny) as running:
        headers = {"content-type": "application/json; charset=UTF-8"}
        answer = await running.http.post("/v1/completions", content=json.dumps(GOOD).encode(), headers=headers)
    assert answer.status_code == 200


@on_loop
async def test_a_compressed_body(tiny: Path) -> None:
    async with serving(tiny) as running:
        headers = {"content-type": "application/json", "content-encoding": "gzip"}
        answer = await running.http.post("/v1/completions", content=b"x", headers=headers)
    assert answer.status_code == 415
    check(answer.json(), "unsupported_content_encoding")


@on_loop
async def test_a_body_over_the_limit_is_refused_before_it_is_sent(tiny: Path) -> None:
    async with serving(tiny, limits=SMALL) as running, connected(running.port) as wire:
        await wire.send_head(content_length="10001")
        answer = await wire.answer()
        assert running.gateway.exchanges.bodies.num_held_bytes == 0
    assert answer.status == 413
    check(answer.json(), "request_too_large")


@on_loop
async def test_a_chunked_body_is_counted_as_it_comes(tiny: Path) -> None:
    async with serving(tiny, limits=SMALL) as running, connected(running.port) as wire:
        await wire.send_head(transfer_encoding="chunked")
        for _ in range(11):
            await wire.send(b"3e8\r\n" + b" " * 1000 + b"\r\n")
        answer = await wire.answer()
        assert running.gateway.exchanges.bodies.num_held_bytes == 0
    assert answer.status == 413
    check(answer.json(), "request_too_large")


@pytest.mark.parametrize("encoding", [{"content_length": "3000000"}, {"transfer_encoding": "chunked"}])
@on_loop
async def test_a_client_that_sends_all_of_a_large_body_still_sees_the_answer(
    tiny: Path, encoding: dict[str, str]
) -> None:
    chunk = b" " * 30_000
    frame = chunk if "content_length" in encoding else b"7530\r\n" + chunk + b"\r\n"
    async with serving(tiny, limits=SMALL) as running, connected(running.port) as wire:
        await wire.send_head(**encoding)
        for _ in range(100):
            await wire.send(frame)
        await wire.send(b"" if "content_length" in encoding else b"0\r\n\r\n")
        assert (await wire.answer()).status == 413
        await wire.post(GOOD)
        assert (await wire.answer()).status == 200


@on_loop
async def test_many_bodies_together_are_bounded(tiny: Path) -> None:
    async with serving(tiny, limits=SMALL) as running:
        bodies = running.gateway.exchanges.bodies
        async with connected(running.port) as one, connected(running.port) as two, connected(running.port) as three:
            for number, wire in enumerate((one, two), 1):
                await wire.send_head(content_length="10000")
                await wire.send(b" " * 9999)
                await until(lambda number=number: bodies.num_held_bytes == number * 9999)  # type: ignore[misc]
            await three.send_head(content_length="9000")
            await three.send(b" " * 8999)
            answer = await three.answer()
        await until(lambda: bodies.num_held_bytes == 0, what="those who left hold nothing")
    assert answer.status == 429
    assert answer.headers["retry-after"] == "1"
    check(answer.json(), "gateway_busy")


@on_loop
async def test_a_body_that_never_comes_is_timed_out(tiny: Path) -> None:
    async with serving(tiny, limits=replace(QUICK, body_timeout_s=0.1)) as running, connected(running.port) as wire:
        await wire.send_head(content_length="100")
        await wire.send(b"{")
        answer = await wire.answer()
        assert await wire.line() == b""  # closed: the rest would be taken for a request
        assert running.gateway.exchanges.bodies.num_held_bytes == 0
    assert answer.status == 408
    check(answer.json(), "body_timeout")


@on_loop
async def test_a_client_that_leaves_amid_its_body_costs_nothing(tiny: Path) -> None:
    async with serving(tiny) as running:
        async with connected(running.port) as wire:
            await wire.send_head(content_length="100")
            await wire.send(b"{")
            await until(lambda: running.gateway.exchanges.bodies.num_held_bytes == 1)
            wire.leave()
            await running.until_quiet()
        assert running.gateway.exchanges.bodies.num_held_bytes == 0


@pytest.mark.parametrize("length", ["-1", "abc", "1,2", "9" * 30])
@on_loop
async def test_a_senseless_content_length(tiny: Path, length: str) -> None:
    async with serving(tiny, limits=SMALL) as running, connected(running.port) as wire:
        await wire.send_head(content_length=length)
        answer = await wire.answer()
        assert not running.decode[0].requests
    assert answer.status in (400, 413)


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/v1/nothing", 404, "unknown_url"),
        ("POST", "/", 404, "unknown_url"),
        ("GET", "/docs", 404, "unknown_url"),
        ("GET", "/openapi.json", 404, "unknown_url"),
        ("POST", "/v1/completions/", 404, "unknown_url"),
        ("GET", "/v1/completions", 405, "method_not_allowed"),
        ("DELETE", "/v1/chat/completions", 405, "method_not_allowed"),
        ("POST", "/v1/models", 405, "method_not_allowed"),
        ("GET", "/v1/models/another", 404, "model_not_found"),
    ],
)
@on_loop
async def test_wrong_paths_and_methods(tiny: Path, method: str, path: str, status: int, code: str) -> None:
    async with serving(tiny) as running:
        answer = await running.http.request(method, path)
    assert answer.status_code == status
    check(answer.json(), code)
    assert (status == 405) == ("allow" in answer.headers)


@on_loop
async def test_a_refused_request_leaves_the_connection_usable(tiny: Path) -> None:
    async with serving(tiny) as running, connected(running.port) as wire:
        await wire.post({"model": "tiny"})
        assert (await wire.answer()).status == 400
        await wire.post(GOOD)
        assert (await wire.answer()).status == 200


@on_loop
async def test_a_key_is_asked_for_where_there_are_keys(tiny: Path) -> None:
    keys = (("key-of-a", "a"), ("key-of-b", "b"))
    async with serving(tiny, api_keys=keys) as running:

        async def status_with(headers: dict[str, str], path: str = "/v1/models") -> int:
            return (await running.http.get(path, headers=headers)).status_code

        answer = await running.complete()
        assert answer.status_code == 401
        check(answer.json(), "missing_api_key")
        assert answer.headers["www-authenticate"] == "Bearer"
        assert await status_with({"authorization": "Bearer key-of-c"}) == 401
        assert await status_with({"authorization": "Bearer"}) == 401
        assert await status_with({"authorization": "Basic key-of-a"}) == 401
        assert await status_with({"authorization": "Bearer key-of-a"}) == 200
        assert await status_with({}, "/status") == 401
        assert await status_with({"authorization": "bearer key-of-b"}, "/status") == 200
        assert [await status_with({}, path) for path in ("/health", "/ready", "/metrics")] == [200, 200, 200]
        for key in ("key-of-b", "key-of-a"):
            await running.http.post("/v1/completions", json=GOOD, headers={"authorization": f"Bearer {key}"})
        assert [request.tenant for request in running.decode[0].requests] == ["b", "a"]


@on_loop
async def test_a_missing_key_is_told_before_the_body_is_read(tiny: Path) -> None:
    async with serving(tiny, api_keys=(("key", "a"),)) as running, connected(running.port) as wire:
        await wire.send_head(content_length="100")
        assert (await wire.answer()).status == 401


@on_loop
async def test_ids_are_ours(tiny: Path) -> None:
    async with serving(tiny) as running:
        chosen = {"x-request-id": "chosen", "idempotency-key": "chosen"}
        first, second = [await running.http.post("/v1/completions", json=GOOD, headers=chosen) for _ in range(2)]
        ids = [request.request_id for request in running.decode[0].requests]
    assert "chosen" not in first.text + first.headers["x-request-id"]
    assert first.headers["x-request-id"] != second.headers["x-request-id"]
    assert ids == [first.headers["x-request-id"], second.headers["x-request-id"]]
