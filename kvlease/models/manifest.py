"""The checksums of a prepared model folder.

Owns `manifest.json`: what a preparation wrote, so that a folder that was damaged or cut short is known before it is served.

Never: covers files that were added later, or protects from a forger.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import xxhash

from kvlease.models.errors import ModelFolderInvalid
from kvlease.models.files import read_json

MANIFEST: Final = "manifest.json"
#: Grows whenever a conversion writes something else than before, so that older folders are made anew.
CONVERSION_VERSION: Final = 1
_CHUNK_BYTES: Final = 1 << 20


def write_manifest(folder: Path) -> None:
    """Record every file of a finished folder."""
    entries = {path.name: _entry(path) for path in sorted(folder.iterdir()) if path.name != MANIFEST}
    content = {"conversion_version": CONVERSION_VERSION, "files": entries}
    (folder / MANIFEST).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def find_fault(folder: Path) -> str | None:
    """What is wrong with a prepared folder, in a few words; None: every recorded byte is there."""
    try:
        content = read_json(folder / MANIFEST)
    except ModelFolderInvalid as error:
        return str(error)
    files = content.get("files")
    if content.get("conversion_version") != CONVERSION_VERSION or not isinstance(files, dict) or not files:
        return f"{folder / MANIFEST} is of another version"
    for name, entry in files.items():
        path = folder / Path(name).name
        try:
            if path.stat().st_size != entry["num_bytes"] or _entry(path) != entry:
                return f"{path} has changed"
        except (OSError, LookupError, TypeError) as error:
            return f"{path} cannot be checked: {error}"
    return None


def hash_file(path: Path) -> str:
    """xxh3 (128 bits, hexadecimal) of a whole file."""
    running = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        while chunk := file.read(_CHUNK_BYTES):
            running.update(chunk)
    return running.hexdigest()


def _entry(path: Path) -> dict[str, Any]:
    return {"num_bytes": path.stat().st_size, "xxh3_128": hash_file(path)}
