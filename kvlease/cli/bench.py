"""`kvlease bench`: its own flags, apart from the servers' options, and what is printed.

Never: imports torch, gRPC or the configuration library unless what is measured needs them.
"""
# ruff: noqa: PLC0415  a machine that measures a bare transport may have none of what the others need

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import NoReturn

from kvlease.bench.errors import BenchFailed
from kvlease.bench.figures import Figure, table
from kvlease.bench.limits import Limits
from kvlease.bench.progress import progress
from kvlease.cli.errors import CommandError, ConfigurationError
from transport.errors import TransportError

_UNITS = {"KIB": 1 << 10, "MIB": 1 << 20, "GIB": 1 << 30, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "B": 1}


class _OneLineParser(argparse.ArgumentParser):
    """A mistake is one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Raise what every refused value raises."""
        raise ConfigurationError(f"{message} (see {self.prog} --help)")


def run_bench(arguments: Sequence[str]) -> int:
    """Measure what `arguments` (after `bench`) ask for, and print it. Returns the exit code; raises CommandError."""
    options = build_bench_parser().parse_args(arguments)
    try:
        figures: list[Figure] = asyncio.run(_MEASUREMENTS[options.what](options))
    except (BenchFailed, TransportError, OSError) as error:
        raise CommandError(" ".join(str(error).split())) from error
    documents = [figure.document() for figure in figures]
    sys.stdout.write(json.dumps(documents, indent=2) + "\n" if options.json else table(documents))
    return 0


def build_bench_parser() -> argparse.ArgumentParser:
    """Flags of everything that can be measured."""
    parser = _OneLineParser(prog="kvlease bench", description="Measure a server, a transport or the handoff.")
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT", title="what can be measured")
    _add_transfer(kinds.add_parser("transfer", help="goodput and latency of blocks over a transport"))
    _add_handoff(kinds.add_parser("handoff", help="proposal, verdict, ready, grant, and rejections"))
    for kind in kinds.choices.values():
        kind.add_argument("--json", action="store_true", help="print JSON instead of a table")
    return parser


def _add_transfer(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--transport", default="tcp", choices=("tcp", "rdma", "memory"), help="memory: both ends in one process")
    add("--host", default="127.0.0.1", help="address of this machine that both ends use (default: %(default)s)")
    sizes = [size_bytes(text) for text in ("16KiB", "64KiB", "256KiB", "1MiB")]
    add("--block-bytes", type=size_bytes, nargs="+", default=sizes, metavar="SIZE", help="default: 16KiB to 1MiB")
    add("--total-bytes", type=size_bytes, default=64 << 20, metavar="SIZE", help="of one transfer (default: 64MiB)")
    add("--ring-bytes", type=size_bytes, default=32 << 20, metavar="SIZE", help="of each ring (default: 32MiB)")
    add("--layers", type=int, default=4, metavar="N", help="of a block: 2N arrays (default: %(default)s)")
    add("--rounds", type=int, default=7, metavar="N", help="default: %(default)s")
    add("--latencies", type=int, default=200, metavar="N", help="blocks sent one by one (default: %(default)s)")
    add("--no-verify", action="store_true", help="the transport alone: no seals, no copy-in; needs no torch")
    add("--busy", default="", metavar="MODEL", help="also while MODEL (tiny, or a folder) decodes beside the receiver")


def _add_handoff(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--transport", default="tcp", choices=("tcp", "rdma"), help="default: %(default)s")
    add("--requests", type=int, default=300, metavar="N", help="of each kind (default: %(default)s)")
    add("--prompt-tokens", type=int, default=64, metavar="N", help="default: %(default)s")


async def _handoff(options: argparse.Namespace) -> list[Figure]:
    from kvlease.bench.handoff import HandoffPlan, measure_handoff

    try:
        plan = HandoffPlan(options.transport, options.requests, options.prompt_tokens)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    with progress("handoff", plan.num_requests) as advance:
        return await measure_handoff(plan, Limits(), advance)


async def _transfer(options: argparse.Namespace) -> list[Figure]:
    from kvlease.bench.transfer.measure import measure_transfer
    from kvlease.bench.transfer.plan import TransferPlan

    try:
        plan = TransferPlan(
            transport=options.transport,
            host=options.host,
            block_bytes=tuple(options.block_bytes),
            total_bytes=options.total_bytes,
            ring_bytes=options.ring_bytes,
            rounds=options.rounds,
            num_latencies=options.latencies,
            num_layers=options.layers,
            is_verified=not options.no_verify,
            busy_model=options.busy,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    with progress("transfer", plan.num_steps) as advance:
        return await measure_transfer(plan, Limits(), advance)


_MEASUREMENTS = {"transfer": _transfer, "handoff": _handoff}


def size_bytes(text: str) -> int:
    """'64KiB', '1MiB' or '65536' as bytes."""
    digits = text.rstrip("KMGIBkmgib")
    unit = text[len(digits) :].upper() or "B"
    if not digits.isdecimal() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 64KiB or 1MiB")
    return int(digits) * _UNITS[unit]
