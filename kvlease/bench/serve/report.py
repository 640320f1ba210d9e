"""The figures of a load.

Never: counts a request that failed among the good ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from kvlease.bench.figures import Document, Figure
from kvlease.bench.serve.answers import Sighting
from kvlease.bench.serve.load import LoadPlan, LoadSeen


def facts_of(plan: LoadPlan, seen: LoadSeen) -> Document:
    """What was asked, how much of it was answered, and how fast all together; errors by kind."""
    good = [sighting for sighting in seen.sightings if not sighting.error]
    num_tokens = sum(sighting.num_tokens for sighting in good)
    return {
        "url": plan.asking.url,
        "model": seen.model,
        "concurrency": plan.concurrency,
        "requests": len(seen.sightings),
        "good": len(good),
        "errors": dict(Counter(sighting.error for sighting in seen.sightings if sighting.error)),
        "prompt tokens": _span(sighting.num_prompt_tokens for sighting in good),
        "generated tokens": _span(sighting.num_tokens for sighting in good),
        "wall s": round(seen.wall_s, 3),
        "generated tokens a second": round(num_tokens / seen.wall_s, 2),
        "requests a second": round(len(good) / seen.wall_s, 3),
    }


def figures_of(seen: LoadSeen) -> list[Figure]:
    """Times of the good requests in milliseconds."""
    good = [sighting for sighting in seen.sightings if not sighting.error]
    samples = {
        "first token": [sighting.first_token_s for sighting in good],
        "between tokens": [gap for sighting in good for gap in sighting.gaps_s],
        "longest gap of a request": [max(sighting.gaps_s) for sighting in good if sighting.gaps_s],
        "per token after the first": [time for sighting in good if (time := sighting.per_token_s) is not None],
        "whole request": [_whole_s(sighting) for sighting in good],
    }
    return [Figure(name, "ms", tuple(value * 1e3 for value in values)) for name, values in samples.items()]


def _whole_s(sighting: Sighting) -> float:
    return sighting.ended - sighting.started


def _span(counts: Iterable[int]) -> str:
    found = sorted(counts)
    if not found:
        return "-"
    return str(found[0]) if found[0] == found[-1] else f"{found[0]} to {found[-1]}"
