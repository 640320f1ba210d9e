"""Figures: named samples with a unit, their percentiles, and how they are shown as a table and as JSON.

Never: measures; a figure is what somebody else saw.
"""

from __future__ import annotations

import math
import os
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

Document = dict[str, object]


def percentile(samples: Sequence[float], share: float) -> float:
    """The smallest sample that at least `share` (0 to 1) of all samples do not exceed: nearest rank, no interpolation."""
    assert samples, "no samples"
    assert 0 <= share <= 1, f"a share of {share}"
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def median(samples: Sequence[float]) -> float:
    """The middle sample; of an even number the mean of the two middle ones."""
    ordered = sorted(samples)
    assert ordered, "no samples"
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


@dataclass(frozen=True, slots=True)
class Figure:
    """Samples of one thing. `labels` tell figures of one name apart; `unit` as in `GB/s`, `us`, `ms`, `tok/s`, `ratio`."""

    name: str
    unit: str
    samples: tuple[float, ...]
    labels: Mapping[str, str] = field(default_factory=dict)

    def document(self) -> Document:
        """For JSON. Percentiles by nearest rank; `low` and `high` are the extreme samples."""
        summary: Document = {"name": self.name, **self.labels, "unit": self.unit, "samples": len(self.samples)}
        if self.samples:
            summary["median"] = _rounded(median(self.samples))
            for share in (90, 99):
                summary[f"p{share}"] = _rounded(percentile(self.samples, share / 100))
            summary["low"], summary["high"] = _rounded(min(self.samples)), _rounded(max(self.samples))
        return summary


class Notes:
    """Samples by name, unit and labels, in the order in which they were first seen."""

    def __init__(self) -> None:
        """Nothing was seen."""
        self._samples: dict[tuple[str, str, tuple[tuple[str, str], ...]], list[float]] = defaultdict(list)

    def add(self, name: str, unit: str, value: float, labels: dict[str, str]) -> None:
        """One more sample."""
        self._samples[name, unit, tuple(labels.items())].append(value)

    def figures(self) -> list[Figure]:
        """Everything that was noted."""
        return [
            Figure(name, unit, tuple(samples), dict(labels)) for (name, unit, labels), samples in self._samples.items()
        ]


@dataclass(frozen=True, slots=True)
class Report:
    """What one measurement has to say: `facts` that hold for all of it, and its figures."""

    facts: Mapping[str, object]
    figures: Sequence[Figure]

    def document(self) -> Document:
        """For JSON."""
        return {"facts": dict(self.facts), "figures": [figure.document() for figure in self.figures]}

    def text(self) -> str:
        """For a terminal."""
        lines = [f"{name}: {_told(value)}\n" for name, value in self.facts.items()]
        return "".join(lines) + "\n" + table([figure.document() for figure in self.figures])


def machine_facts() -> Document:
    """What a reader must know of the machine to compare: its cores, and how busy it is (1-minute load average)."""
    return {"cores": len(os.sched_getaffinity(0)), "load": round(os.getloadavg()[0], 2)}


def table(documents: Sequence[Mapping[str, object]]) -> str:
    """The documents as aligned columns, every key that any of them has, in the order of appearance."""
    columns = list(dict.fromkeys(key for document in documents for key in document))
    if not columns:
        return "nothing was measured\n"
    rows = [tuple(columns), *(tuple(_text(document.get(key, "")) for key in columns) for document in documents)]
    widths = [max(len(row[index]) for row in rows) for index in range(len(columns))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines) + "\n"


def _told(value: object) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{number} x {kind}" for kind, number in value.items()) or "none"
    return str(value)


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _rounded(value: float) -> float:
    """Four significant digits: no measurement here is worth more."""
    return float(f"{value:.4g}")
