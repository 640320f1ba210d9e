"""Folders that are made once and then shared by all processes of a user.

Owns the way a folder comes to be: built in a scratch folder beside its place, recorded in a manifest and renamed, under a
file lock; one that does not match its manifest is built anew.

Never: knows what is in a folder, or shows one that is not whole.
"""

from __future__ import annotations

import contextlib
import glob
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import filelock

from kvlease.models.limits import LIMITS
from kvlease.models.manifest import find_fault, write_manifest
from kvlease.models.progress import Progress

#: Fills the first folder; the second is scratch space that goes away afterwards.
Build = Callable[[Path, Path], None]

_LOCK_WAIT_S: Final = LIMITS.fetch_s + LIMITS.convert_s


def cached_folder(folder: Path, build: Build, progress: Progress) -> Path:
    """`folder`, whole; what `build` raises passes through and leaves nothing. Also raises OSError and filelock.Timeout."""
    if find_fault(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder, progress):
        if find_fault(folder) is not None:  # else another process was faster
            _make(folder, build)
    return folder


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    lock = filelock.FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress(f"waiting for another process that prepares {folder.name}", 0, 0)
        lock.acquire(timeout=_LOCK_WAIT_S)
    try:
        yield
    finally:
        lock.release()


def _make(folder: Path, build: Build) -> None:
    prefix = f".{folder.name}."
    for rest in folder.parent.glob(f"{glob.escape(prefix)}*"):  # we hold the lock: the builder of these was killed
        shutil.rmtree(rest, ignore_errors=True)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        target = scratch / "target"
        target.mkdir()
        build(target, scratch)
        write_manifest(target)
        if folder.exists():
            folder.rename(scratch / "replaced")
        target.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
