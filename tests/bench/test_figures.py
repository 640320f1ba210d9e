from __future__ import annotations

import json

import pytest

from kvlease.bench.figures import Figure, median, percentile, table


def test_a_percentile_is_a_sample_and_nobody_below_it_is_left_out() -> None:
    samples = [float(number) for number in range(100, 0, -1)]
    assert [percentile(samples, share) for share in (0, 0.01, 0.5, 0.9, 0.99, 1)] == [1, 1, 50, 90, 99, 100]
    assert percentile([7.0], 0.99) == 7.0
    assert percentile([1.0, 2.0, 3.0], 0.5) == 2.0


def test_a_median_is_the_middle() -> None:
    assert median([3.0, 1.0, 2.0]) == 2.0
    assert median([4.0, 1.0, 2.0, 3.0]) == 2.5


def test_a_figure_is_summed_up_for_json_and_for_a_table() -> None:
    figure = Figure("copy", "GB/s", (1.0, 2.0, 3.123456), {"block": "16 KiB"})
    document = figure.document()
    assert json.loads(json.dumps(document)) == document
    assert document["block"] == "16 KiB"
    assert (document["median"], document["high"], document["samples"]) == (2.0, 3.123, 3)
    _, row = table([document]).splitlines()
    assert row.split()[:3] == ["copy", "16", "KiB"]


def test_a_figure_without_samples_claims_nothing() -> None:
    assert Figure("copy", "GB/s", ()).document() == {"name": "copy", "unit": "GB/s", "samples": 0}


def test_columns_are_those_of_all_rows() -> None:
    heading, *rows = table([{"a": 1, "b": "x"}, {"a": 2.5, "c": "y"}]).splitlines()
    assert heading.split() == ["a", "b", "c"]
    assert rows[1].split() == ["2.5", "y"]
    assert rows[1].index("y") == heading.index("c")


@pytest.mark.parametrize("rows", [[], [{}]])
def test_nothing_is_said_to_be_nothing(rows: list[dict[str, object]]) -> None:
    assert table(rows) == "nothing was measured\n"
