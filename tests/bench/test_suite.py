from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvlease.bench.errors import PartnerFailed
from kvlease.bench.limits import Limits
from kvlease.bench.suite import SECTIONS, TARGETS, page_of, run_suite, write_results
from kvlease.cli.bench import build_bench_parser
from kvlease.cli.main import main

ROOT = Path(__file__).parents[2]
SMALL = (
    "transfer",
    "--no-verify",
    "--block-bytes",
    "16KiB",
    "--total-bytes",
    "1MiB",
    "--rounds",
    "1",
    "--latencies",
    "2",
)


def document(median: float) -> dict[str, object]:
    figure = {
        "name": "verified to stream",
        "block": "256 KiB",
        "order": "consecutive",
        "unit": "ratio",
        "median": median,
    }
    other = {**figure, "order": "random"}
    machine = {"python": "3.11", "cores": 2, "load": 0.1}
    return {
        "version": "0",
        "date": "2030-01-02",
        "machine": machine,
        "transfer": {"facts": {"load": 1.0}, "figures": [figure, other]},
    }


def test_a_section_is_run_as_a_command_and_written(tmp_path: Path) -> None:
    steps: list[int] = []
    found = run_suite([("transfer", SMALL)], Limits(), lambda: steps.append(1))
    data, page = write_results(found, tmp_path / "results")
    assert json.loads(data.read_text()) == found
    assert "| bare to stream | 16 KiB, consecutive | ratio |" in page.read_text()
    assert steps == [1]


def test_a_section_that_fails_ends_the_suite() -> None:
    with pytest.raises(PartnerFailed, match="exit code 2"):
        run_suite([("transfer", ("transfer", "--rounds", "0"))], Limits(), lambda: None)


def test_targets_are_judged_for_what_they_are_meant_for() -> None:
    assert page_of(document(0.7)).count("| met |") == 1
    assert page_of(document(0.69)).count("| not met |") == 1


def test_every_target_is_of_a_section_and_every_section_can_be_parsed() -> None:
    assert {target.section for target in TARGETS} <= {name for name, _ in SECTIONS}
    for _, words in SECTIONS:
        build_bench_parser().parse_args([*words, "--json"])


def test_an_unknown_section_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "all", "--only", "nonsense"]) == 2
    assert "handoff" in capsys.readouterr().err


def test_every_section_and_every_figure_of_a_target_is_explained() -> None:
    guide = (ROOT / "benchmarks" / "README.md").read_text()
    assert all(f"\n## {words[0]}\n" in guide for _, words in SECTIONS)
    for target in TARGETS:
        assert target.figure.removeprefix("verified ") in guide.replace("\n", " ")
