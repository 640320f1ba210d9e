"""What one token leaves behind in the KV cache, and how a block of tokens is laid out on the wire.

A layout names the arrays of each layer with the shape and dtype of one token slot. A *canonical block* of `block_size`
tokens holds, layer by layer and array by array, `[block_size, *shape]` in C order and little-endian, each array
starting at a multiple of 64 bytes, the gaps zero:

    | layer 0 k | gap | layer 0 v | gap | layer 1 k | ...

It is what crosses the border, whatever block size and memory layout either side keeps privately.

Never: knows what attention does with an array, or imports torch.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from kvlease.kvcache.limits import DEFAULT_LIMITS

ALIGNMENT = 64
FINGERPRINT_BYTES = 16
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


def aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up to the alignment of arrays and slots."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array of a layer: shape and dtype of a single token slot."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    def __post_init__(self) -> None:
        """Refuse an array that holds nothing, or a dtype that has no fixed bytes here."""
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(f"array {self.name!r} has dtype {self.dtype!r}; known are {', '.join(DTYPE_BYTES)}")
        if not self.name or not self.shape or any(size <= 0 for size in self.shape):
            raise ValueError(f"an array needs a name and positive sizes, got {self.name!r} {self.shape}")

    @property
    def token_bytes(self) -> int:
        """Bytes of one token slot."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]

    def describe(self) -> str:
        """Name and shape, as `k[3x64]`."""
        return f"{self.name}[{'x'.join(map(str, self.shape))}]"


@dataclass(frozen=True, slots=True)
class ArraySpan:
    """Where one array lies in a canonical block: `num_bytes` from `offset_bytes`, without the gap after it."""

    layer: int
    name: str
    offset_bytes: int
    num_bytes: int


@dataclass(frozen=True)  # not slotted: the sums below are asked for on every block
class Layout:
    """The arrays of every layer, in canonical order."""

    layers: tuple[tuple[ArraySpec, ...], ...]

    def __post_init__(self) -> None:
        """Refuse an empty layout and two arrays of one name in a layer."""
        if not 0 < len(self.layers) <= DEFAULT_LIMITS.max_layers:
            raise ValueError(f"a layout has 1 to {DEFAULT_LIMITS.max_layers} layers, got {len(self.layers)}")
        for index, layer in enumerate(self.layers):
            if not layer or len({array.name for array in layer}) != len(layer):
                raise ValueError(f"layer {index} needs arrays with different names")

    @cached_property
    def token_bytes(self) -> int:
        """Bytes that one token takes over all layers, gaps aside."""
        return sum(array.token_bytes for layer in self.layers for array in layer)

    def spans(self, block_size: int) -> tuple[ArraySpan, ...]:
        """Where each array of a canonical block of `block_size` tokens lies, in canonical order."""
        check_block_size(block_size)
        spans, offset = [], 0
        for index, layer in enumerate(self.layers):
            for array in layer:
                num_bytes = array.token_bytes * block_size
                spans.append(ArraySpan(index, array.name, offset, num_bytes))
                offset += aligned(num_bytes)
        return tuple(spans)

    def content_bytes(self, block_size: int) -> int:
        """Bytes of a canonical block of `block_size` tokens, a multiple of 64."""
        check_block_size(block_size)
        return sum(aligned(array.token_bytes * block_size) for layer in self.layers for array in layer)

    def fingerprint(self, model_fingerprint: bytes) -> bytes:
        """16 bytes over the layout and the model. The block size is no part of it: the two sides may differ there."""
        if len(model_fingerprint) != FINGERPRINT_BYTES:
            raise ValueError(f"a model fingerprint is {FINGERPRINT_BYTES} bytes, got {len(model_fingerprint)}")
        digest = hashlib.blake2b(model_fingerprint, digest_size=FINGERPRINT_BYTES, person=b"kvlease-layout")
        for layer in self.layers:
            line = ",".join(f"{array.describe()}:{array.dtype}" for array in layer)
            digest.update(line.encode() + b"\n")
        return digest.digest()

    def describe(self) -> str:
        """One line for logs and refusals, as `30 layers, k[3x64] v[3x64], float32`."""
        parts = []
        for layer, same in groupby(self.layers):
            count = len(list(same))
            names = " ".join(array.describe() for array in layer)
            dtypes = "/".join(dict.fromkeys(array.dtype for array in layer))
            parts.append(f"{count} layer{'s' if count > 1 else ''}, {names}, {dtypes}")
        return "; ".join(parts)


def check_block_size(block_size: int) -> None:
    """Refuse a block size that no ring and no pool could use."""
    if not 0 < block_size <= DEFAULT_LIMITS.max_block_size:
        raise ValueError(f"a block holds 1 to {DEFAULT_LIMITS.max_block_size} tokens, got {block_size}")


def attention_layout(num_layers: int, num_kv_heads: int, head_dim: int, dtype: str) -> Layout:
    """The layout of ordinary attention: in every layer keys and values of `[num_kv_heads, head_dim]`."""
    layer = tuple(ArraySpec(name, (num_kv_heads, head_dim), dtype) for name in ("k", "v"))
    return Layout((layer,) * num_layers)
