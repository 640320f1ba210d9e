"""A trial that passes has seen what it says: its client refuses every other answer."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from deploy.trial.__main__ import DEFAULT_MODEL, Client, num_blocks
from deploy.trial.cluster import Cluster
from deploy.trial.commands import NoEngine, TrialFailed, attempt, run, wait_for
from deploy.trial.engine import engine
from deploy.trial.image import requirements

KEY = "the key"
Scripted = tuple[int, object]


def text(content: str) -> Scripted:
    return 200, {"choices": [{"text": content}]}


@contextmanager
def gateway(answers: Sequence[Scripted]) -> Iterator[Cluster]:
    """A cluster whose gateway gives these answers, in order, to who has the key."""
    left = iter(answers)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            status, body = next(left)
            self.send_response(status if self.headers["Authorization"] == f"Bearer {KEY}" else 401)
            self.end_headers()
            self.wfile.write(json.dumps(body).encode())

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield Cluster((), {}, server.server_address[1], KEY)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_same_text_again_and_again_is_counted() -> None:
    with gateway([text(" Paris.")] * 3) as running:
        client = Client(running, DEFAULT_MODEL)
        assert {client.ask() for _ in range(3)} == {" Paris."}
    assert client.summary().startswith("3 answers, all 200 and the same text")
    assert client.summary().startswith("0 answers")


@pytest.mark.parametrize(
    ("model", "answers", "complaint"),
    [
        (DEFAULT_MODEL, [text(" London.")], "was answered with ' London.'"),
        ("tiny", [text("abc"), text("abd")], "the text was 'abc', and is now 'abd'"),
        ("tiny", [text("")], "no text"),
        ("tiny", [(503, {"error": "nobody"})], "answered with 503"),
    ],
)
def test_any_other_answer_ends_the_trial(model: str, answers: Sequence[Scripted], complaint: str) -> None:
    with gateway(answers) as running:
        client = Client(running, model)
        for _ in answers[:-1]:
            client.ask()
        with pytest.raises(TrialFailed, match=complaint):
            client.ask()


def test_a_broken_connection_ends_the_trial() -> None:
    with gateway([]) as running:
        pass
    with pytest.raises(TrialFailed, match="answered with 0"):
        Client(running, "tiny").ask()


def test_blocks_are_counted_over_all_pairs_of_a_server() -> None:
    assert num_blocks({}) == 0
    assert num_blocks({"pairs": [{"num_blocks": 2}, {"num_blocks": 3}, {}]}) == 5


def test_without_an_engine_and_without_root_nothing_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/nobody")
    with pytest.raises(NoEngine, match="only root can start one"), engine(tmp_path, own=False, is_root=False):
        pytest.fail("there is none")


def test_a_command_that_fails_or_takes_too_long_ends_the_trial_with_its_output() -> None:
    with pytest.raises(TrialFailed, match="status 3:\n    why"):
        run(["sh", "-c", "echo why; exit 3"], within_s=5)
    with pytest.raises(TrialFailed, match="took more than 0 s:\n    why"):
        run(["sh", "-c", "echo why; exec sleep 5"], within_s=0.2)
    assert attempt(["no such command"], within_s=5)[0] == 127


def test_what_does_not_become_true_ends_the_trial() -> None:
    with pytest.raises(TrialFailed, match="not within 0 s: the moon"):
        wait_for(lambda: False, within_s=0, what="the moon")


def test_the_trial_fetches_what_the_image_installs() -> None:
    dependencies, model = requirements()
    assert any(word.startswith("torch") for word in dependencies)
    assert "==" in model
