"""What the README promises to a newcomer: its own commands, against the default model in three processes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import urllib.request
from pathlib import Path

from tests.waiting import wait_until
from tests.whole.serving import Served

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def block(name: str) -> str:
    """The fenced block behind a marker."""
    found = re.search(rf"<!-- test: {name} -->\n```\w+\n(.*?)```", README, re.DOTALL)
    assert found, name
    return found.group(1)


def get(url: str) -> dict[str, object]:
    with urllib.request.urlopen(url, timeout=10) as answer:
        found = json.load(answer)
    assert isinstance(found, dict)
    return found


def test_the_readmes_curl_is_answered(cluster: Served) -> None:
    command = block("curl").replace("http://127.0.0.1:8000", cluster.url)
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=True)
    assert "Paris" in json.loads(done.stdout)["choices"][0]["message"]["content"]


def test_the_readmes_openai_client_is_answered_whole_and_streamed(cluster: Served, tmp_path: Path) -> None:
    program = tmp_path / "ask.py"
    program.write_text(block("openai").replace("http://127.0.0.1:8000", cluster.url))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, timeout=60, check=True)
    whole, streamed = done.stdout.split("\n", 1)
    assert "Paris" in whole
    assert streamed.strip() == whole.strip()


def test_the_text_crossed_the_border_as_sealed_blocks(cluster: Served) -> None:
    subprocess.run(["bash", "-c", block("curl").replace("http://127.0.0.1:8000", cluster.url)], check=True, timeout=60)

    def verified() -> bool:
        servers = get(f"{cluster.url}/status")["servers"]
        assert isinstance(servers, list)
        decode = next(server for server in servers if server["role"] == "decode")
        prefill = next(server for server in servers if server["role"] == "prefill")
        return bool(
            decode["counters"].get("blocks_verified", 0) >= 3
            and prefill["counters"].get("blocks_sent") == decode["counters"]["blocks_verified"]
            and decode["blocks"]["free"] == decode["blocks"]["total"]
            and prefill["blocks"]["free"] == prefill["blocks"]["total"]
        )

    wait_until(verified, within_s=5, what="both sides agree on the blocks, and all of them are free again")


def test_the_gateway_process_has_not_loaded_torch(cluster: Served) -> None:
    maps = Path(f"/proc/{cluster.children()['gateway']}/maps").read_text()
    assert "libtorch" not in maps


def test_a_killed_server_is_restarted_and_the_next_request_is_served(cluster: Served) -> None:
    for role in ("prefill", "decode"):
        before = cluster.children()[role]
        subprocess.run(["kill", "-9", str(before)], check=True)
        wait_until(lambda b=before, r=role: cluster.children().get(r, b) != b, within_s=30, what=f"a new {role}")  # type: ignore[misc]
        command = block("curl").replace("http://127.0.0.1:8000", cluster.url)

        def answered(line: str = command) -> bool:
            done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=60, check=True)
            answer = json.loads(done.stdout)
            assert "choices" in answer or answer["error"]["code"], "an answer, or a clear error"
            return "Paris" in json.dumps(answer)

        wait_until(answered, within_s=60, what=f"an answer after the {role} server was killed")
