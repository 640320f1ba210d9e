"""Reading the small files of a model folder.

Never: raises anything but ModelFolderInvalid, which names the file.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from kvlease.models.errors import ModelFolderInvalid
from kvlease.models.limits import LIMITS


def read_json(path: Path, *, missing: dict[str, Any] | None = None) -> dict[str, Any]:
    """The object in `path`; `missing` is the answer for a file that is not there (None: it must be)."""
    try:
        if path.stat().st_size > LIMITS.max_json_bytes:
            raise ModelFolderInvalid(f"{path} is larger than {LIMITS.max_json_bytes} bytes")
        content = json.loads(path.read_bytes())
    except FileNotFoundError:
        if missing is not None:
            return missing
        raise ModelFolderInvalid(f"{path} is missing") from None
    except (OSError, ValueError) as error:
        raise ModelFolderInvalid(f"{path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ModelFolderInvalid(f"{path} does not hold a JSON object")
    return content


def read_text(path: Path) -> str:
    """The UTF-8 text in `path`."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ModelFolderInvalid(f"{path} cannot be read: {error}") from error


def weight_files(folder: Path) -> tuple[Path, ...]:
    """The safetensors files of a folder, sorted by name; raises ModelFolderInvalid when one is missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return _sharded(folder, index)
    single = folder / "model.safetensors"
    if single.is_file():
        return (single,)
    if any(folder.glob("pytorch_model*.bin")):
        raise ModelFolderInvalid(f"{folder} holds its weights as pytorch_model.bin: save them as safetensors first")
    raise ModelFolderInvalid(f"{single} is missing")


def _sharded(folder: Path, index: Path) -> tuple[Path, ...]:
    shards = read_json(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise ModelFolderInvalid(f"{index} names no weights")
    names = sorted({str(name) for name in shards.values()})
    for name in names:
        if Path(name).name != name:
            raise ModelFolderInvalid(f"{index} names a file outside the folder: {name}")
        if not (folder / name).is_file():
            raise ModelFolderInvalid(f"{folder / name} is missing, but {index.name} names it")
    return tuple(folder / name for name in names)
