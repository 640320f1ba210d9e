"""The fingerprint of a model: equal for two folders only if they hold the same model.

Owns what goes into it: the configuration without the members that only tell its history, the weights, the tokenizer.

Never: a proof against a forger; it tells honest servers apart.
"""

from __future__ import annotations

import hashlib
import json
import mmap
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import xxhash

from kvlease.models.errors import ModelFolderInvalid
from kvlease.models.files import weight_files
from kvlease.models.limits import LIMITS, Limits

FINGERPRINT_BYTES: Final = 16

#: Where a configuration came from and how it is used, not what the model computes.
_HISTORY: Final = frozenset(
    ("_name_or_path", "_model_name_or_path", "transformers_version", "use_cache", "architectures")
)


def model_fingerprint(folder: Path, configuration: Mapping[str, Any], limits: Limits = LIMITS) -> bytes:
    """16 bytes over configuration, weights and tokenizer; raises ModelFolderInvalid for files that are missing."""
    facts = {key: value for key, value in configuration.items() if key not in _HISTORY}
    whole = hashlib.blake2b(digest_size=FINGERPRINT_BYTES, person=b"kvlease-model")
    whole.update(_framed(json.dumps(facts, sort_keys=True).encode()))
    whole.update(_framed(_digest(folder / "tokenizer.json", limits)))
    for path in weight_files(folder):
        whole.update(_framed(_weights_digest(path, limits)))
    return whole.digest()


def _framed(part: bytes) -> bytes:
    """A part with its length before it, so that no two lists of parts hash alike."""
    return len(part).to_bytes(8, "little") + part


def _weights_digest(path: Path, limits: Limits) -> bytes:
    """Size, header and content of a safetensors file; a damaged one is refused here, before it is mapped as weights."""
    num_bytes = path.stat().st_size
    with path.open("rb") as file:
        num_header_bytes = int.from_bytes(file.read(8), "little")
        if num_bytes < 8 or num_header_bytes > min(limits.max_header_bytes, num_bytes - 8):
            raise ModelFolderInvalid(f"{path} is not a whole safetensors file")
        header = file.read(num_header_bytes)
    try:
        end = max(
            (entry["data_offsets"][1] for name, entry in json.loads(header).items() if name != "__metadata__"),
            default=0,
        )
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise ModelFolderInvalid(f"{path} has a broken safetensors header") from error
    if 8 + num_header_bytes + end != num_bytes:
        raise ModelFolderInvalid(f"{path} has {num_bytes} bytes, its header says {8 + num_header_bytes + end}")
    return num_bytes.to_bytes(8, "little") + xxhash.xxh3_128_digest(header) + _digest(path, limits)


def _digest(path: Path, limits: Limits) -> bytes:
    """xxh3 of a file: of all of it up to `limits.whole_hash_bytes`, else of evenly spaced samples."""
    if not path.is_file() or path.stat().st_size == 0:
        raise ModelFolderInvalid(f"{path} is missing or empty")
    running = xxhash.xxh3_128()
    with (
        path.open("rb") as file,
        mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content,
        memoryview(content) as view,
    ):
        for start, end in _ranges(len(view), limits):
            with view[start:end] as part:
                running.update(part)
    return running.digest()


def _ranges(num_bytes: int, limits: Limits) -> Iterator[tuple[int, int]]:
    if num_bytes <= limits.whole_hash_bytes:
        yield 0, num_bytes
        return
    last = num_bytes - limits.hash_sample_bytes
    for index in range(limits.num_hash_samples):
        start = last * index // (limits.num_hash_samples - 1)
        yield start, start + limits.hash_sample_bytes
