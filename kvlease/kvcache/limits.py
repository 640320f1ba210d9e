"""Named limits of the KV cache.

Never: read from a flag or the environment here.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on sizes and on the work of one call."""

    #: Tokens in a block, private or on the wire. Larger ones waste memory on short texts and need huge ring slots.
    max_block_size: int = 4096
    #: Layers of a layout. The deepest published decoders have a little over a hundred.
    max_layers: int = 1024
    #: How many starting places `take` tries for a consecutive run: a shattered pool costs well under a millisecond.
    run_search: int = 2048
    #: Whole contexts a server keeps room for when nobody said how many: one long text cannot stop every other one.
    default_contexts: int = 4
    #: Memory of a pool when nobody said how large: fits a small machine beside the weights of a small model.
    default_pool_bytes: int = 2 << 30


DEFAULT_LIMITS = Limits()
