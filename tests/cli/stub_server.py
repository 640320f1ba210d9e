"""A server that serves nothing: it speaks the parent's protocol, listens on its port, and notes what happens in a journal.

The variable STUB names, as JSON, the journal's path (`journal`) and for each command how it misbehaves (`refuse`, `die`, `ignore_sigterm`,
`ask_for_k1`).
"""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import FrameType

from kvlease.cli.child import attach

COMMAND = sys.argv[1]
STUB = json.loads(os.environ["STUB"])
HOW = STUB.get(COMMAND, "")


def note(what: str, **fields: object) -> None:
    """One line in the journal, written in one piece."""
    line = json.dumps({"what": what, "command": COMMAND, "pid": os.getpid(), **fields}) + "\n"
    journal = os.open(STUB["journal"], os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    os.write(journal, line.encode())
    os.close(journal)


class Handler(BaseHTTPRequestHandler):
    """What `serve` asks a gateway."""

    def do_GET(self) -> None:
        models = [{"id": "stub-model", "max_model_len": 1024}]
        body = json.dumps({"data": models, "pairs": [{"transport": "tcp"}]}).encode()
        is_let_in = HOW != "ask_for_k1" or self.path != "/v1/models" or self.headers["Authorization"] == "Bearer k1"
        self.send_response(200 if is_let_in else 401)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body if is_let_in else b" " * len(body))

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002  the library's name
        """Say nothing."""


def stop(number: int, frame: FrameType | None) -> None:
    note("told")
    if HOW != "ignore_sigterm":
        sys.exit(0)


def main() -> None:
    parent = attach()
    config = parent.config
    note("started", port=config["port"], secret=hashlib.sha256(str(config["secret"]).encode()).hexdigest())
    if HOW == "refuse":
        parent.report_refused("the stub does not like its configuration")
        sys.exit(2)
    if HOW == "die":
        sys.exit(7)
    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    server = ThreadingHTTPServer((str(config["host"]), int(str(config["port"]))), Handler)
    os.write(2, b"a line of log\n")
    parent.report_listening(f"{config['host']}:{server.server_address[1]}")
    note("listening", port=server.server_address[1])
    server.serve_forever()


main()
