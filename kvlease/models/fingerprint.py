"""The fingerprint of a model: equal for two folders only if they hold the same model.

Owns what goes into it: the configuration without the members that only tell its history, the weights, the tokenizer.

Never: a proof against a forger; it tells honest servers apart.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import xxhash

from kvlease.models.errors import ModelFolderInvalid
from kvlease.models.files import weight_files
from kvlease.models.limits import LIMITS, Limits

FINGERPRINT_BYTES: Final = 16
_CHUNK_BYTES: Final = 1 << 20

#: Where a configuration came from and how it is used, not what the model computes.
_HISTORY: Final = frozenset(
    ("_name_or_path", "_model_name_or_path", "transformers_version", "use_cache", "architectures")
)


def model_fingerprint(folder: Path, configuration: Mapping[str, Any], limits: Limits = LIMITS) -> bytes:
    """16 bytes over configuration, weights and tokenizer; raises ModelFolderInvalid for files that are missing or cut.

    Weights of more than `limits.whole_hash_bytes` in all are hashed by evenly spaced samples of each file.
    """
    facts = {key: value for key, value in configuration.items() if key not in _HISTORY}
    paths = weight_files(folder)
    sizes = [path.stat().st_size for path in paths]
    num_samples = 0 if sum(sizes) <= limits.whole_hash_bytes else max(2, limits.num_hash_samples // len(paths))
    whole = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"kvlease-model")
    whole.update(_framed(json.dumps(facts, sort_keys=True).encode()))
    whole.update(_framed((folder / "tokenizer.json").read_bytes()))
    for path, num_bytes in zip(paths, sizes, strict=True):
        header = _safetensors_header(path, num_bytes, limits)
        ranges = _samples(num_bytes, num_samples, limits.hash_sample_bytes) if num_samples else [(0, num_bytes)]
        whole.update(_framed(num_bytes.to_bytes(8, "little") + _framed(header) + _digest(path, ranges)))
    return whole.digest()


def _framed(part: bytes) -> bytes:
    """A part with its length before it, so that no two lists of parts hash alike."""
    return len(part).to_bytes(8, "little") + part


def _safetensors_header(path: Path, num_bytes: int, limits: Limits) -> bytes:
    """The JSON header; a file that is damaged or cut short is refused here, before it is mapped as weights."""
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_header_bytes > min(limits.max_header_bytes, num_bytes - 8):
            raise ModelFolderInvalid(f"{path} is not a whole safetensors file")
        header = file.read(num_header_bytes)
    try:
        entries = [entry for name, entry in json.loads(header).items() if name != "__metadata__"]
        end = 8 + num_header_bytes + max((entry["data_offsets"][1] for entry in entries), default=0)
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelFolderInvalid(f"{path} has a broken safetensors header") from error
    if end != num_bytes:
        raise ModelFolderInvalid(f"{path} has {num_bytes} bytes, its header says {end}")
    return header


def _digest(path: Path, ranges: Iterable[tuple[int, int]]) -> bytes:
    """xxh3 of some ranges of a file, read in small pieces: mapping it would count all of it as our memory."""
    running = xxhash.xxh3_128()
    with path.open("rb", buffering=0) as file:
        for start, end in ranges:
            file.seek(start)
            num_left = end - start
            while num_left and (piece := file.read(min(_CHUNK_BYTES, num_left))):
                running.update(piece)
                num_left -= len(piece)
    return running.digest()


def _samples(num_bytes: int, num_samples: int, sample_bytes: int) -> Iterator[tuple[int, int]]:
    last = max(0, num_bytes - sample_bytes)
    for index in range(num_samples):
        start = last * index // (num_samples - 1)
        yield start, min(num_bytes, start + sample_bytes)
