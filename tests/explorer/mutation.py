"""Runs the mutants: each in a copy of the packages, in a process of its own that was forked before it imported any of ours.

    python -m tests.explorer.mutation [--quick] [--trace NAME]

Torch is imported once, before the forks; that is most of what a fresh process would cost.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.explorer.mutants import BY_EXPLORER, EVERY, Mutant

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("decode_server", "gateway", "kvlease", "prefill_server", "transport")
_TEST_LIMIT_S = 120


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of one mutant. `how`: the promise that broke, or the test that failed; empty: it lived."""

    mutant: Mutant
    how: str
    text: str
    drawing: str = ""

    @property
    def is_caught(self) -> bool:
        """By what was to catch it."""
        return bool(self.how) and (bool(self.mutant.test) or self.how in self.mutant.caught_by)


def run_mutants(mutants: Sequence[Mutant]) -> Iterator[Outcome]:
    """Each in turn. This process must not have imported the packages."""
    import torch  # noqa: F401 - for the forks

    for mutant in mutants:
        with tempfile.TemporaryDirectory(prefix="kvlease-mutant-") as folder:
            make_copy(mutant, Path(folder))
            yield _by_test(mutant, Path(folder)) if mutant.test else _by_explorer(mutant, Path(folder))


def make_copy(mutant: Mutant, folder: Path) -> None:
    """The packages with the mutant's edits, and the tests where one of them is to fail."""
    skip = shutil.ignore_patterns("__pycache__", "explorer", "cluster", "whole", "cli", "gateway", "models", "engine")
    for package in PACKAGES:
        shutil.copytree(ROOT / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"))
    if mutant.test:
        shutil.copytree(ROOT / "tests", folder / "tests", ignore=skip)
        shutil.copy(ROOT / "pyproject.toml", folder)
    for path, old, new in mutant.edits:
        source = (folder / path).read_text(encoding="utf-8")
        assert source.count(old) == 1, f"{mutant.guard}: {path} has {source.count(old)} times {old!r}"
        (folder / path).write_text(source.replace(old, new), encoding="utf-8")


def _by_test(mutant: Mutant, folder: Path) -> Outcome:
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", "-p", "no:cacheprovider", mutant.test]
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    ran = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=_TEST_LIMIT_S, check=False
    )
    failed = [line for line in ran.stdout.splitlines() if line.startswith("FAILED ")]
    text = failed[0].removeprefix("FAILED ").split(" - ")[0] if failed else ran.stdout[-300:] + ran.stderr[-300:]
    return Outcome(mutant, mutant.test if ran.returncode == 1 and failed else "", text)


def _by_explorer(mutant: Mutant, folder: Path) -> Outcome:
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        status = 1
        try:
            sys.path.insert(0, str(folder))
            with os.fdopen(writer, "w") as pipe:
                json.dump(_explore(mutant), pipe)
            status = 0
        except BaseException:
            traceback.print_exc()
            raise
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return Outcome(mutant, *json.loads(said)) if said else Outcome(mutant, "", "the exploration itself failed")


def _explore(mutant: Mutant) -> tuple[str, str, str]:
    """In the child: the worlds in order of their size, until one breaks."""
    from tests.explorer.diagram import draw
    from tests.explorer.scenarios import FOR_MUTANTS
    from tests.explorer.search import Search

    for scenario in FOR_MUTANTS:
        violation = Search(scenario, looks_at_rests=mutant.looks_at_rests).run().violation
        if violation is not None:
            return violation.promise, f"{violation.text} ({scenario.name})", draw(scenario, violation)
    return "", "no world broke", ""


def main() -> None:
    """Print a line for each mutant; exit 1 if one lived."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="without those that tests catch")
    parser.add_argument("--terse", action="store_true", help="only what lived, and the figures")
    parser.add_argument("--only", default="", help="the mutants whose guard has this in it")
    parser.add_argument("--trace", default="", help="draw the ways of the mutants whose guard or kin has this in it")
    options = parser.parse_args()
    mutants = BY_EXPLORER if options.quick else EVERY
    if options.only or options.trace:
        mutants = tuple(m for m in EVERY if options.only in m.guard and options.trace in m.guard + m.kin)
    started = time.perf_counter()
    outcomes = []
    for outcome in run_mutants(mutants):
        outcomes.append(outcome)
        if not (options.terse and outcome.is_caught):
            mark = "caught" if outcome.is_caught else "LIVED "
            print(f"{mark} {outcome.mutant.guard}: {outcome.how or '-'}: {outcome.text[:240]}", flush=True)
        if options.trace:
            print(outcome.drawing)
    lived = [outcome for outcome in outcomes if not outcome.is_caught]
    print(f"{len(outcomes) - len(lived)} of {len(outcomes)} mutants caught in {time.perf_counter() - started:.0f} s")
    sys.exit(bool(lived))


if __name__ == "__main__":
    main()
