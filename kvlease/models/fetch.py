"""A model by name, folder or file to a folder that can be served.

Owns the cache of prepared models: each is built in a scratch folder beside its place and renamed into it, under a file lock,
with a manifest; a folder that does not match its manifest is built anew.

Never: holds torch (conversion is a child process), or changes a folder that is not its own.
"""

from __future__ import annotations

import contextlib
import glob
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import filelock

import kvlease
from kvlease.models.child import run_child
from kvlease.models.errors import ModelUnavailable, ModelUnknown
from kvlease.models.folder import check_folder
from kvlease.models.limits import LIMITS
from kvlease.models.manifest import find_fault, hash_file, write_manifest
from kvlease.models.progress import Progress, TerminalProgress
from kvlease.models.wheel import SMOLLM2, obtain_gguf

DEFAULT_MODEL: Final = "smollm2-135m-instruct"

#: Gives the GGUF file to convert; may write into the scratch folder that it gets.
Source = Callable[[Path, Progress], Path]

_NUM_STEPS: Final = 4  # lines that the conversion writes


def default_cache_dir() -> Path:
    """`KVLEASE_CACHE`, else `kvlease` in the user's cache directory."""
    if chosen := os.environ.get("KVLEASE_CACHE"):
        return Path(chosen).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "kvlease"


def prepare_model(name_or_path: str, cache_dir: Path | None = None, progress: Progress | None = None) -> Path:
    """The folder of a model that is ready to be served; raises ModelUnusable with one line.

    `name_or_path` is `smollm2-135m-instruct`, a folder with safetensors (used as it is) or a GGUF file (converted
    once). Prepared folders live in `cache_dir`/models; progress goes to standard error unless told otherwise. Blocks.
    """
    models = (cache_dir or default_cache_dir()).absolute() / "models"
    path = Path(name_or_path).expanduser()
    if name_or_path != DEFAULT_MODEL and path.is_dir():
        check_folder(path)
        return path
    bar = TerminalProgress()
    try:
        return _prepare_cached(name_or_path, path.absolute(), models, progress or bar)
    except (OSError, filelock.Timeout) as error:
        raise ModelUnavailable(f"the model {name_or_path} cannot be prepared in {models}: {error}") from error
    finally:
        bar.close()


def _prepare_cached(name: str, path: Path, models: Path, progress: Progress) -> Path:
    if name == DEFAULT_MODEL:
        return _prepared(
            models / DEFAULT_MODEL, lambda scratch, report: obtain_gguf(SMOLLM2, models, scratch, report), progress
        )
    if path.suffix == ".gguf" and path.is_file():
        return _prepared(models / f"{path.stem}-{hash_file(path)[:16]}", lambda scratch, report: path, progress)
    raise ModelUnknown(f"there is no model {name!r}: give {DEFAULT_MODEL}, a folder with safetensors, or a .gguf file")


def _prepared(folder: Path, source: Source, progress: Progress) -> Path:
    if find_fault(folder) is None:
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    with _locked(folder, progress):
        if find_fault(folder) is not None:
            _build(folder, source, progress)
    return folder


@contextlib.contextmanager
def _locked(folder: Path, progress: Progress) -> Iterator[None]:
    lock = filelock.FileLock(folder.with_name(f"{folder.name}.lock"))
    try:
        lock.acquire(timeout=0)
    except filelock.Timeout:
        progress(f"waiting for another process that prepares {folder.name}", 0, 0)
        lock.acquire(timeout=LIMITS.fetch_s + LIMITS.convert_s)
    try:
        yield
    finally:
        lock.release()


def _build(folder: Path, source: Source, progress: Progress) -> None:
    """Build beside the place and swap in; the caller holds the lock, so what lies about is of builds that were killed."""
    prefix = f".{folder.name}."
    for rest in folder.parent.glob(f"{glob.escape(prefix)}*"):
        shutil.rmtree(rest)
    scratch = Path(tempfile.mkdtemp(prefix=prefix, dir=folder.parent))
    try:
        target = scratch / "target"
        target.mkdir()
        _convert(source(scratch, progress), target, scratch, progress)
        check_folder(target)
        write_manifest(target)
        if folder.exists():
            folder.rename(scratch / "replaced")
        target.rename(folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _convert(gguf: Path, target: Path, scratch: Path, progress: Progress) -> None:
    stage = f"converting {gguf.name}"
    log = scratch / "convert"
    progress(stage, 0, _NUM_STEPS)
    root = str(Path(kvlease.__file__).parent.parent)
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, (root, os.environ.get("PYTHONPATH")))),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_VERBOSITY": "error",
    }
    outcome = run_child(
        [sys.executable, "-m", "kvlease.models.convert", str(gguf), str(target)],
        environment,
        log,
        LIMITS.convert_s,
        lambda: progress(stage, log.with_suffix(".out").read_bytes().count(b"\n"), _NUM_STEPS),
    )
    if not outcome.succeeded:
        raise ModelUnavailable(f"{gguf} cannot be converted: {outcome.complaint}")
    progress(stage, _NUM_STEPS, _NUM_STEPS)
