"""The model of a measurement: any that can be served, or a tiny one that is made for it.

Never: leaves a model behind that was made here.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kvlease.bench.errors import BenchFailed
from kvlease.models.errors import ModelUnusable
from kvlease.models.fetch import prepare_model
from kvlease.models.tiny import make_tiny_model

TINY = "tiny"
TINY_CONTEXT = 4096


@contextmanager
def measured_model(name: str) -> Iterator[Path]:
    """Its folder. Raises `BenchFailed` when there is none."""
    if name != TINY:
        try:
            folder = prepare_model(name)
        except ModelUnusable as error:
            raise BenchFailed(f"--model {name}: {error}") from error
        yield folder
        return
    with tempfile.TemporaryDirectory() as scratch:
        yield make_tiny_model(Path(scratch) / TINY, context_length=TINY_CONTEXT)
