from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from kvlease.cli.errors import Unreachable
from kvlease.cli.limits import Limits
from kvlease.cli.main import main
from kvlease.cli.status import render_table, report_status

LIMITS = Limits(answer_s=5.0)
PAIR = {"peer": "127.0.0.1:9001", "transport": "tcp", "epoch": 3, "state": "paired", "detail": ""}
BLOCKS = {"free": 90, "reserved": 5, "filling": 1, "readable": 4, "total": 100}
DECODE = {
    "role": "decode",
    "address": "127.0.0.1:9002",
    "incarnation": "0123456789abcdef",
    "blocks": BLOCKS,
    "num_queued": 2,
    "num_running": 3,
    "transport": "tcp, as asked",
    "pairs": [PAIR, {**PAIR, "peer": "127.0.0.1:9003", "state": "refused", "detail": "other model"}],
}
DOCUMENT = {"servers": [{"role": "prefill", "address": "127.0.0.1:9001", "blocks": BLOCKS}, DECODE]}


@contextmanager
def gateway(status: int, body: bytes, path: str = "/status", api_key: str = "") -> Iterator[str]:
    """A gateway with one answer to GET `path`, for who has the key if there is one; yields its URL."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_let_in = not api_key or self.headers["Authorization"] == f"Bearer {api_key}"
            self.send_response((status if self.path == path else 404) if is_let_in else 401)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
            return

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_the_table_shows_each_server_with_its_blocks_and_pairs() -> None:
    heading, prefill, decode = render_table(DOCUMENT).splitlines()
    assert heading.split()[:3] == ["ROLE", "ADDRESS", "INCARNATION"]
    assert prefill.split() == ["prefill", "127.0.0.1:9001", "-", "-", "-", "90", "5", "1", "4", "100", "-", "-"]
    assert decode.split()[:10] == ["decode", "127.0.0.1:9002", "01234567", "2", "3", "90", "5", "1", "4", "100"]
    assert decode.endswith("tcp 127.0.0.1:9001 paired, tcp 127.0.0.1:9003 refused (other model)  tcp, as asked")
    assert heading.index("PAIRS") == decode.index("tcp 127.0.0.1:9001")


@pytest.mark.parametrize("document", [{}, {"servers": []}, {"servers": 3}, {"servers": [1, None]}])
def test_an_answer_of_another_shape_is_an_empty_table(document: dict[str, object]) -> None:
    assert render_table(document) == "no servers\n"


def test_what_a_server_says_cannot_write_to_the_terminal() -> None:
    assert "\x1b" not in render_table({"servers": [{"role": "\x1b[2J"}]})


def test_json_is_the_answer_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    with gateway(200, json.dumps(DOCUMENT).encode()) as url:
        assert main(["status", "--json", "--url", url]) == 0
    assert json.loads(capsys.readouterr().out) == DOCUMENT


def test_a_gateway_that_asks_for_a_key_gets_the_first_of_the_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = tmp_path / "keys"
    keys.write_text("k1 acme\nk2 globex\n")
    with gateway(200, json.dumps(DOCUMENT).encode(), api_key="k1") as url:
        assert main(["status", "--url", url, "--api-keys-file", str(keys)]) == 0
        assert "ROLE" in capsys.readouterr().out
        assert main(["status", "--url", url]) == 1
        assert "--api-keys-file" in capsys.readouterr().err


@pytest.mark.parametrize(("status", "body"), [(503, b"{}"), (200, b"<html>"), (200, b"[]"), (200, b"\xff")])
def test_an_answer_that_is_no_status_is_unreachable(status: int, body: bytes) -> None:
    with gateway(status, body) as url, pytest.raises(Unreachable):
        report_status(url, False, LIMITS)


def test_no_gateway_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    with gateway(200, b"{}") as url:
        pass
    assert main(["status", "--url", url]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert output.err.count("\n") == 1
    assert url in output.err
