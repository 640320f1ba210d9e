"""What the servers take of a machine: memory at the peak of real work, and processor time when there is none."""

from __future__ import annotations

import json
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from kvlease.models.chat_template import ChatTemplate
from kvlease.models.fetch import DEFAULT_MODEL, prepare_model
from kvlease.models.tokenizer import Tokenizer
from tests.oracle.prompts import real_prompts
from tests.waiting import wait_until
from tests.whole.serving import POOL_BLOCKS, POOL_FLAGS, Served, served

NUM_PARAMETERS = 134_515_008  # of the default model, each once: its embedding is also its last layer
KV_VALUES = 2 * 30 * 3 * 64  # of a token: keys and values, layers, heads, values of a head
BOUND_BYTES = 500_000_000  # beside the pool and the weights
#: Of a core. Servers promise a hundredth; five times that is left to a slow or busy machine. A loop that polls takes it whole.
IDLE_SHARE = 0.05
WINDOW_S = 8.0

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(400)]


def complete(cluster: Served, prompt: tuple[int, ...]) -> int:
    """Tokens of the answer to a prompt given as tokens."""
    body = {"model": "smollm2-135m-instruct", "prompt": prompt, "max_tokens": 32, "temperature": 0}
    request = urllib.request.Request(
        f"{cluster.url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=300) as answer:
        return int(json.load(answer)["usage"]["completion_tokens"])


def answer_the_oracles_prompts_at_once(cluster: Served) -> None:
    folder = prepare_model(DEFAULT_MODEL)
    template = ChatTemplate.load(folder)
    assert template is not None
    prompts = real_prompts(Tokenizer.load(folder), template)
    with ThreadPoolExecutor(len(prompts)) as pool:
        assert all(pool.map(lambda prompt: complete(cluster, prompt), prompts))


def assert_memory_is_bounded(cluster: Served, value_bytes: int) -> None:
    bound = (POOL_BLOCKS * 16 * KV_VALUES + NUM_PARAMETERS) * value_bytes + BOUND_BYTES
    for role in ("prefill", "decode"):
        assert cluster.peak_bytes(role) <= bound, role


def idle_share(cluster: Served, role: str) -> float:
    """The smaller share of a core in two windows: something else may wake it in one."""
    shares = []
    for _ in range(2):
        before = cluster.cpu_seconds(role)
        over = time.monotonic() + WINDOW_S
        wait_until(lambda over=over: time.monotonic() >= over, within_s=2 * WINDOW_S, what="the window is over")  # type: ignore[misc]
        shares.append((cluster.cpu_seconds(role) - before) / WINDOW_S)
    return min(shares)


def test_idle_servers_block(cluster: Served) -> None:
    roles = ("prefill", "decode", "gateway")
    with ThreadPoolExecutor(len(roles)) as pool:
        shares = dict(zip(roles, pool.map(lambda role: idle_share(cluster, role), roles), strict=True))
    assert max(shares.values()) < IDLE_SHARE, shares


def test_memory_at_the_peak_is_pool_and_weights_and_a_bound(cluster: Served) -> None:
    answer_the_oracles_prompts_at_once(cluster)
    assert_memory_is_bounded(cluster, value_bytes=4)


def test_bfloat16_answers_within_its_half_of_the_memory(tmp_path: Path) -> None:
    with served(tmp_path, *POOL_FLAGS, "--dtype", "bfloat16") as cluster:
        answer_the_oracles_prompts_at_once(cluster)
        assert_memory_is_bounded(cluster, value_bytes=2)
