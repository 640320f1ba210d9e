"""A progress bar on standard error, where that is a terminal.

Never: writes to standard output, or needs the library that draws bars to be there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[], None]]:
    """`total` steps; the function that is lent counts one more. Nothing is drawn where nobody looks."""
    bar = _bar(what, total) if sys.stderr.isatty() else None
    try:
        yield _nothing if bar is None else lambda: bar.update(1)  # type: ignore[attr-defined]
    finally:
        if bar is not None:
            bar.close()  # type: ignore[attr-defined]


def _bar(what: str, total: int) -> object | None:
    try:
        from tqdm import tqdm  # noqa: PLC0415  a machine that only measures a transport may lack it
    except ImportError:
        return None
    return tqdm(total=total, desc=what, leave=False)


def _nothing() -> None:
    """No bar."""
