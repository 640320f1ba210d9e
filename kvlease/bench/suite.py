"""Everything that can be measured, one command after the other, and the page that is made of it.

Never: measures itself; each command runs in a process of its own, as a user would run it.
"""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvlease import __version__
from kvlease.bench.children import child_environ
from kvlease.bench.errors import BenchFailed, PartnerFailed
from kvlease.bench.figures import Document, machine_facts
from kvlease.bench.limits import Limits


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure's median ought to be: at most, or at least, `bound`. `where`: the labels it is meant for."""

    section: str
    figure: str
    bound: float
    is_floor: bool = False
    where: tuple[tuple[str, str], ...] = ()

    def matches(self, section: str, figure: Document) -> bool:
        """Whether it is meant for this one."""
        named = section == self.section and figure["name"] == self.figure
        return named and all(figure.get(key) == value for key, value in self.where)

    def is_met(self, median: float) -> bool:
        """By this median."""
        return median >= self.bound if self.is_floor else median <= self.bound

    @property
    def text(self) -> str:
        """As `at least 0.7`."""
        return f"at {'least' if self.is_floor else 'most'} {self.bound:g}"


def _transfer(block: str, order: str, bound: float) -> Target:
    return Target("transfer", "verified to stream", bound, True, (("block", block), ("order", order)))


TARGETS = (
    _transfer("16 KiB", "consecutive", 0.5),
    _transfer("256 KiB", "consecutive", 0.7),
    _transfer("1024 KiB", "consecutive", 0.7),
    Target("handoff", "handoff", 3_000),
    Target("handoff", "rejected at the door", 2_000),
    Target("cluster", "first token beyond +10 %", 5),
    Target("cluster", "per token to one process", 1.03),
    Target("cluster", "start to ready", 15),
    Target("engine", "step of 16: 1024 to 128 tokens", 1.6),
)

#: Section by section: what is run. The default model's own block is 720 KiB in 60 arrays; the others are made of 8.
SECTIONS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("transfer", ("transfer",)),
    ("transfer of the default model's blocks", ("transfer", "--block-bytes", "720KiB", "--layers", "30")),
    ("transfer beside decoding", ("transfer", "--busy", "smollm2-135m-instruct", "--block-bytes", "64KiB", "1MiB")),
    ("transfer in one process", ("transfer", "--transport", "memory", "--rounds", "3")),
    ("handoff", ("handoff",)),
    ("engine", ("engine",)),
    ("cluster", ("cluster",)),
)


def run_suite(sections: Iterable[tuple[str, Sequence[str]]], limits: Limits, advance: Callable[[], None]) -> Document:
    """Each section's report by its name, and when and where it was made. Raises `PartnerFailed`."""
    document: Document = {"version": __version__, "date": time.strftime("%Y-%m-%d"), "machine": _machine()}
    for name, words in sections:
        document[name] = _measured(words, limits)
        advance()
    return document


def _measured(words: Sequence[str], limits: Limits) -> Document:
    command = [sys.executable, "-P", "-m", "kvlease", "bench", *words, "--json"]
    try:
        done = subprocess.run(  # noqa: S603  our own command
            command, check=False, stdout=subprocess.PIPE, env=child_environ(), timeout=limits.section_s, text=True
        )
    except subprocess.TimeoutExpired:
        raise PartnerFailed(f"bench {' '.join(words)}: not done within {limits.section_s:g} s") from None
    if done.returncode != 0:
        raise PartnerFailed(f"bench {' '.join(words)} ended with exit code {done.returncode}")
    report: Document = json.loads(done.stdout)
    return report


def _machine() -> Document:
    return {"system": platform.release(), "python": platform.python_version(), **machine_facts()}


def write_results(document: Document, folder: Path) -> tuple[Path, Path]:
    """The JSON and the page, named by their date; those of an earlier run of the day are replaced."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        data, page = (folder / f"{document['date']}.{kind}" for kind in ("json", "md"))
        data.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        page.write_text(page_of(document), encoding="utf-8")
    except OSError as error:
        raise BenchFailed(f"{folder}: cannot be written: {error.strerror}") from error
    return data, page


def page_of(document: Document) -> str:
    """The whole run as markdown: targets first, then each section's medians."""
    machine = document["machine"]
    assert isinstance(machine, dict), machine
    where = f"Version {document['version']}, Python {machine['python']}, {machine['cores']} cores"
    guide = "What each line is: [benchmarks/README.md](../README.md)."
    lines = [f"# {document['date']}", "", f"{where}, load {machine['load']} before the run. {guide}", ""]
    lines += _targets(document)
    for section, report in _reports(document):
        facts = report["facts"]
        assert isinstance(facts, dict), facts
        lines += ["", f"## {section}", "", f"Load after it: {facts['load']}.", "", *_section(_figures(report))]
    return "\n".join(lines) + "\n"


def _targets(document: Document) -> list[str]:
    lines = ["| target | figure | for | wanted | median | |", "|---|---|---|---|---|---|"]
    for section, report in _reports(document):
        for figure in _figures(report):
            for target in TARGETS:
                if target.matches(section, figure) and isinstance(median := figure.get("median"), float):
                    verdict = "met" if target.is_met(median) else "not met"
                    cells = (
                        section,
                        figure["name"],
                        _labels(figure),
                        target.text,
                        f"{median:g} {figure['unit']}",
                        verdict,
                    )
                    lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _section(figures: list[Document]) -> list[str]:
    lines = ["| figure | for | unit | median | p99 | low | high |", "|---|---|---|---|---|---|---|"]
    for figure in figures:
        values = [figure.get(key, "") for key in ("unit", "median", "p99", "low", "high")]
        lines.append("| " + " | ".join(map(str, (figure["name"], _labels(figure), *values))) + " |")
    return lines


def _labels(figure: Document) -> str:
    known = {"name", "unit", "samples", "median", "p90", "p99", "low", "high"}
    return ", ".join(str(value) for key, value in figure.items() if key not in known)


def _reports(document: Document) -> list[tuple[str, Document]]:
    return [(name, report) for name, report in document.items() if isinstance(report, dict) and "figures" in report]


def _figures(report: Document) -> list[Document]:
    figures = report["figures"]
    assert isinstance(figures, list), figures
    return figures
