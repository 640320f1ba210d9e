"""A gateway starts without its servers, says so, and ends when it is told to."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from gateway.app import run
from gateway.errors import StartRefused
from tests.gateway.serving import config, on_loop


@on_loop
async def test_it_listens_before_any_server_answers_and_stops_at_a_signal(tiny: Path) -> None:
    listening: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    settings = config(model=tiny, secret="s", decode_servers=("127.0.0.1:9",), prefill_servers=("127.0.0.1:9",), port=0)
    serving = asyncio.create_task(run(settings, listening.set_result))
    address = await asyncio.wait_for(listening, 10)
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=10) as http:
        assert (await http.get("/health")).status_code == 200
        assert (await http.get("/ready")).status_code == 503
        answer = await http.post("/v1/completions", json={"model": "tiny", "prompt": "hello"})
        assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_server")
        too_long = await http.post("/v1/completions", json={"model": "tiny", "prompt": [5] * 2000})
        assert too_long.json()["error"]["code"] == "context_length_exceeded"
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(serving, 10)


@on_loop
async def test_a_port_in_use_is_one_line_that_says_what_to_change(tiny: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(StartRefused, match=f"127.0.0.1:{port} .*--port") as caught:
            await run(config(model=tiny, port=port), lambda _: None)
    assert "\n" not in str(caught.value)


def test_a_gateway_loads_no_torch() -> None:
    code = "import sys, gateway.app; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, timeout=60).returncode == 0
