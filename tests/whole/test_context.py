"""Pools of different sizes: the context that is offered is what fits both, and what asks for more is refused before any traffic."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from kvlease.models.tiny import make_tiny_model
from tests.whole.serving import Served, served

FITS = 43 * 16  # tokens
CONTEXT = 1024  # of the model

pytestmark = pytest.mark.timeout(200)


@pytest.fixture(params=[(43, 128), (128, 43)], ids=["prefill is smaller", "decode is smaller"])
def flags(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[str, ...]:
    num_prefill, num_decode = request.param
    folder = make_tiny_model(tmp_path / "tiny", seed=5, context_length=CONTEXT)
    return ("--model", str(folder), "--prefill-blocks", str(num_prefill), "--decode-blocks", str(num_decode))


def test_a_context_that_is_asked_for_and_does_not_fit_refuses_to_start(flags: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "kvlease", "serve", "--port", "0", *flags, "--max-model-len", str(CONTEXT)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert f"--max-model-len {CONTEXT}" in done.stderr
    assert str(FITS) in done.stderr


def test_without_it_the_models_list_says_what_fits_and_a_longer_prompt_is_refused(
    flags: tuple[str, ...], tmp_path: Path
) -> None:
    with served(tmp_path, *flags) as cluster:
        [model] = ask(cluster, "/v1/models")[1]["data"]
        assert model["max_model_len"] == FITS
        before = counters(cluster)
        for num_tokens in (FITS, FITS + 1, CONTEXT - 2):
            status, answer = ask(cluster, "/v1/completions", prompt_of(model["id"], num_tokens))
            assert (status, answer["error"]["type"]) == (400, "invalid_request_error")
            assert str(FITS) in answer["error"]["message"]
        assert counters(cluster) == before, "nothing was computed or sent"
        status, answer = ask(cluster, "/v1/completions", prompt_of(model["id"], FITS - 4))
        assert (status, answer["usage"]["completion_tokens"]) == (200, 4)


def prompt_of(model: str, num_tokens: int) -> dict[str, object]:
    return {"model": model, "prompt": [3 + place % 200 for place in range(num_tokens)], "max_tokens": 4}


def counters(cluster: Served) -> list[tuple[str, object, object]]:
    """Of each server: what it has done and which blocks it holds."""
    servers = ask(cluster, "/status")[1]["servers"]
    return [(server["role"], server["counters"], server["blocks"]) for server in servers]


def ask(cluster: Served, path: str, body: dict[str, object] | None = None) -> tuple[int, dict]:  # type: ignore[type-arg]
    data = json.dumps(body).encode() if body is not None else None
    request = urllib.request.Request(cluster.url + path, data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)
