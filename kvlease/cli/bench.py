"""`kvlease bench`: its own flags, apart from the servers' options, and what is printed.

Never: imports torch, gRPC or the configuration library unless what is measured needs them.
"""
# ruff: noqa: PLC0415  a machine that measures a bare transport may have none of what the others need

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import NoReturn

from kvlease.bench.errors import BenchFailed
from kvlease.bench.figures import Report, machine_facts
from kvlease.bench.limits import Limits
from kvlease.bench.progress import progress
from kvlease.cli.errors import CommandError, ConfigurationError
from transport.errors import TransportError

_ALL = "all"
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
        if options.what == _ALL:
            return _run_all(options)
        report = asyncio.run(_MEASUREMENTS[options.what](options))
    except (BenchFailed, TransportError, OSError) as error:
        raise CommandError(" ".join(str(error).split())) from error
    sys.stdout.write(json.dumps(report.document(), indent=2) + "\n" if options.json else report.text())
    return 0


def build_bench_parser() -> argparse.ArgumentParser:
    """Flags of everything that can be measured."""
    parser = _OneLineParser(prog="kvlease bench", description="Measure a server, a transport or the handoff.")
    kinds = parser.add_subparsers(dest="what", required=True, metavar="WHAT", title="what can be measured")
    _add_transfer(kinds.add_parser("transfer", help="goodput and latency of blocks over a transport"))
    _add_serve(kinds.add_parser("serve", help="load on a server that speaks OpenAI's HTTP API, ours or another one"))
    _add_engine(kinds.add_parser("engine", help="passes of the engine in one process, beside transformers"))
    _add_cluster(kinds.add_parser("cluster", help="a whole cluster beside one process, and its start"))
    _add_handoff(kinds.add_parser("handoff", help="proposal, verdict, ready, grant, and rejections"))
    _add_all(kinds.add_parser(_ALL, help="all of it but `serve`, written to a folder"))
    for kind in kinds.choices.values():
        if kind is not kinds.choices[_ALL]:
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


def _add_all(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--output", default="benchmarks/results", metavar="DIR", help="default: %(default)s")
    parser.add_argument("--only", nargs="+", default=[], metavar="SECTION", help="sections whose names begin so")


def _run_all(options: argparse.Namespace) -> int:
    from kvlease.bench.suite import SECTIONS, page_of, run_suite, write_results

    wanted = [section for section in SECTIONS if not options.only or section[0].startswith(tuple(options.only))]
    if not wanted:
        raise ConfigurationError(f"--only: sections are {', '.join(name for name, _ in SECTIONS)}")
    with progress("sections", len(wanted)) as advance:
        document = run_suite(wanted, Limits(), advance)
    written = write_results(document, Path(options.output))
    sys.stdout.write(page_of(document) + "\n" + "".join(f"written: {path}\n" for path in written))
    return 0


def _add_serve(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("url", metavar="URL", help="for example http://127.0.0.1:8000, or with a path: http://127.0.0.1:8000/v1")
    add("--model", default="", metavar="NAME", help="default: the first that the server names")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), metavar="KEY", help="default: OPENAI_API_KEY")
    add("--chat", action="store_true", help="/chat/completions instead of /completions")
    add("--concurrency", type=int, default=4, metavar="N", help="requests at a time (default: %(default)s)")
    add("--requests", type=int, default=32, metavar="N", help="in all (default: %(default)s)")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="about; the server counts (default: %(default)s)")
    add("--max-tokens", type=int, default=64, metavar="N", help="of an answer (default: %(default)s)")
    add("--duration", type=float, default=0.0, metavar="SECONDS", help="no request begins later; 0: no bound")
    add("--timeout", type=float, default=300.0, metavar="SECONDS", help="of one request (default: %(default)s)")
    add("--ignore-eos", action="store_true", help="ask for all tokens; not every server knows the field")
    add("--seed", type=int, default=0, metavar="N", help="of the prompts")


async def _serve(options: argparse.Namespace) -> Report:
    from kvlease.bench.serve.client import Asking
    from kvlease.bench.serve.limits import Limits as LoadLimits
    from kvlease.bench.serve.load import LoadPlan, generate_load
    from kvlease.bench.serve.report import facts_of, figures_of

    try:
        asking = Asking(options.url, options.model, options.api_key, options.chat, options.ignore_eos, options.timeout)
        plan = LoadPlan(
            asking=asking,
            concurrency=options.concurrency,
            num_requests=options.requests,
            prompt_tokens=options.prompt_tokens,
            max_tokens=options.max_tokens,
            duration_s=options.duration,
            seed=options.seed,
        )
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    with progress("requests", plan.num_requests) as advance:
        seen = await generate_load(plan, LoadLimits(), advance)
    return Report({**facts_of(plan, seen), **machine_facts()}, figures_of(seen))


def _add_engine(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", metavar="NAME|PATH", help="or tiny (default: %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="default: %(default)s")
    add("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    add("--prompt-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--sequences", type=int, default=16, metavar="N", help="of a large step (default: %(default)s)")
    add("--contexts", type=int, nargs="+", default=[128, 1024], metavar="TOKENS", help="default: 128 1024")


async def _engine(options: argparse.Namespace) -> Report:
    from kvlease.engine.threads import prepare_environment

    prepare_environment(max(1, options.threads))
    from kvlease.bench.engine import EnginePlan, measure_engine
    from kvlease.bench.models import measured_model

    with measured_model(options.model) as model:
        try:
            plan = EnginePlan(
                model,
                options.threads,
                options.rounds,
                options.prompt_tokens,
                options.sequences,
                tuple(options.contexts),
            )
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        with progress("engine", plan.rounds) as advance:
            figures = measure_engine(plan, advance)
    return Report({**asdict(plan), "model": options.model, **machine_facts()}, figures)


def _add_cluster(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--model", default="smollm2-135m-instruct", metavar="NAME|PATH", help="or tiny (default: %(default)s)")
    add("--threads", type=int, default=1, metavar="N", help="of each engine (default: %(default)s)")
    add("--starts", type=int, default=3, metavar="N", help="of the cluster (default: %(default)s)")
    add("--rounds", type=int, default=5, metavar="N", help="default: %(default)s")
    add("--prompt-tokens", type=int, nargs="+", default=[128, 1024], metavar="TOKENS", help="default: 128 1024")
    add("--max-tokens", type=int, default=32, metavar="N", help="of an answer (default: %(default)s)")


async def _cluster(options: argparse.Namespace) -> Report:
    from kvlease.engine.threads import prepare_environment

    prepare_environment(max(1, options.threads))
    from kvlease.bench.cluster import ClusterPlan, measure_cluster
    from kvlease.bench.models import measured_model

    with measured_model(options.model) as model:
        prompts = tuple(options.prompt_tokens)
        try:
            plan = ClusterPlan(model, options.threads, options.starts, options.rounds, prompts, options.max_tokens)
        except ValueError as error:
            raise ConfigurationError(str(error)) from None
        with progress("cluster", plan.starts + (plan.rounds + 1) * len(prompts)) as advance:
            figures = await measure_cluster(plan, Limits(), advance)
    return Report({**asdict(plan), "model": options.model, **machine_facts()}, figures)


def _add_handoff(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--transport", default="tcp", choices=("tcp", "rdma"), help="default: %(default)s")
    add("--requests", type=int, default=300, metavar="N", help="of each kind (default: %(default)s)")
    add("--prompt-tokens", type=int, default=64, metavar="N", help="default: %(default)s")


async def _handoff(options: argparse.Namespace) -> Report:
    from kvlease.bench.handoff import HandoffPlan, measure_handoff

    try:
        plan = HandoffPlan(options.transport, options.requests, options.prompt_tokens)
    except ValueError as error:
        raise ConfigurationError(str(error)) from None
    with progress("handoff", plan.num_requests) as advance:
        figures = await measure_handoff(plan, Limits(), advance)
    return Report({**asdict(plan), **machine_facts()}, figures)


async def _transfer(options: argparse.Namespace) -> Report:
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
        figures = await measure_transfer(plan, Limits(), advance)
    return Report({**asdict(plan), **machine_facts()}, figures)


_MEASUREMENTS = {"transfer": _transfer, "serve": _serve, "engine": _engine, "cluster": _cluster, "handoff": _handoff}


def size_bytes(text: str) -> int:
    """'64KiB', '1MiB' or '65536' as bytes."""
    digits = text.rstrip("KMGIBkmgib")
    unit = text[len(digits) :].upper() or "B"
    if not digits.isdecimal() or unit not in _UNITS:
        raise argparse.ArgumentTypeError(f"{text!r} is no size like 64KiB or 1MiB")
    return int(digits) * _UNITS[unit]
