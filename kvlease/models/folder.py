"""Whether a folder can be served, before anything dear is started.

Never: changes the folder.
"""

from __future__ import annotations

from pathlib import Path

from kvlease.models.errors import ModelFolderInvalid
from kvlease.models.facts import supported_family
from kvlease.models.files import read_json, weight_files


def check_folder(folder: Path) -> None:
    """Raises ModelFolderInvalid naming the file, or UnsupportedModel naming what the engine lacks."""
    supported_family(read_json(folder / "config.json"))
    if not (folder / "tokenizer.json").is_file():
        raise ModelFolderInvalid(_without_tokenizer(folder))
    weight_files(folder)


def _without_tokenizer(folder: Path) -> str:
    line = f"{folder / 'tokenizer.json'} is missing"
    if any((folder / name).is_file() for name in ("tokenizer.model", "vocab.json", "spiece.model")):
        command = "transformers.AutoTokenizer.from_pretrained(FOLDER).save_pretrained(FOLDER)"
        return f"{line}; the older tokenizer files that are there can be turned into it by {command}"
    return line
