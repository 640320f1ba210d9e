"""How far the preparation of a model is.

Never: writes to standard output.
"""

from __future__ import annotations

import sys
from typing import Any, Protocol

from tqdm import tqdm


class Progress(Protocol):
    """Told what is being done; called often, from one thread."""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """`done` of `total` of a stage: bytes for a fetch, steps otherwise; a total of 0 is not known."""


def silent(stage: str, done: int, total: int) -> None:
    """Say nothing."""


class TerminalProgress:
    """A bar on standard error, one for each stage; where that is no terminal, one line for each stage."""

    def __init__(self) -> None:
        """Draw nothing yet."""
        self._stage = ""
        self._bar: tqdm[Any] | None = None

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Draw, or begin the next stage."""
        if stage != self._stage:
            self.close()
            self._begin(stage, total)
        if self._bar is not None:
            self._bar.update(done - self._bar.n)

    def close(self) -> None:
        """Leave the last bar as it is and go to the next line."""
        if self._bar is not None:
            self._bar.close()
        self._bar, self._stage = None, ""

    def _begin(self, stage: str, total: int) -> None:
        self._stage = stage
        if not sys.stderr.isatty():
            sys.stderr.write(f"{stage}\n")
            sys.stderr.flush()
            return
        sizes = total > 1000  # steps are few
        self._bar = tqdm(total=total or None, desc=stage, unit="B" if sizes else "step", unit_scale=sizes, leave=True)
