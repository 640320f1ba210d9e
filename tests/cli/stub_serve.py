"""`kvlease serve` with stub servers and a model that needs no preparing."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from kvlease.cli.capacity import PoolSize, refuse_context_that_does_not_fit
from kvlease.cli.errors import CommandError
from kvlease.cli.options import from_process
from kvlease.cli.serve import serve
from kvlease.cli.settings import Settings

STUB_PROGRAM = (sys.executable, str(Path(__file__).with_name("stub_server.py")))


def prepare_nothing(settings: Settings, pools: tuple[PoolSize, ...]) -> Path:
    refuse_context_that_does_not_fit(settings.max_model_len, 2048, pools)
    with Path(json.loads(os.environ["STUB"])["journal"]).open("a") as journal:
        journal.write(json.dumps({"what": "prepared", "command": "serve", "pid": os.getpid()}) + "\n")
    return Path("/models/stub")


def main() -> int:
    try:
        return serve(from_process(["serve", *sys.argv[1:]]).settings, STUB_PROGRAM, prepare_nothing)
    except CommandError as error:
        sys.stderr.write(f"kvlease: {error}\n")
        return error.exit_code


sys.exit(main())
