"""A model by name, folder or file to a folder that can be served.

Owns the names that are known without a path, and where prepared models live.

Never: holds torch (conversion is a child process), or changes a folder that is not its own.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Final

import filelock

import kvlease
from kvlease.models.cache import cached_folder
from kvlease.models.child import run_child
from kvlease.models.errors import ModelUnavailable, ModelUnknown
from kvlease.models.folder import check_folder
from kvlease.models.limits import LIMITS
from kvlease.models.manifest import hash_file
from kvlease.models.progress import Progress, TerminalProgress
from kvlease.models.wheel import SMOLLM2, obtain_gguf

DEFAULT_MODEL: Final = "smollm2-135m-instruct"

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
        folder = models / DEFAULT_MODEL
    elif path.suffix == ".gguf" and path.is_file():
        folder = models / f"{path.stem}-{hash_file(path)[:16]}"
    else:
        raise ModelUnknown(
            f"there is no model {name!r}: give {DEFAULT_MODEL}, a folder with safetensors or a .gguf file"
        )

    def build(target: Path, scratch: Path) -> None:
        source = obtain_gguf(SMOLLM2, models, scratch, progress) if name == DEFAULT_MODEL else path
        convert_in_child(source, target, scratch, progress)
        check_folder(target)

    return cached_folder(folder, build, progress)


def convert_in_child(gguf: Path, target: Path, scratch: Path, progress: Progress) -> None:
    """Convert `gguf` into the folder `target` in a process of its own; raises ModelUnavailable with its complaint."""
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
