"""Whether the context that was asked for fits the model and the pools that were asked for.

Never: allocates; asks a server.
"""

from __future__ import annotations

from dataclasses import dataclass

from kvlease.cli.errors import ConfigurationError
from kvlease.kvcache.sizing import blocks_for


@dataclass(frozen=True, slots=True)
class PoolSize:
    """A pool whose size was given: the option that gave it, its blocks, and token slots in a block."""

    option: str
    num_blocks: int
    block_size: int

    @property
    def num_tokens(self) -> int:
        """Token slots in the whole pool."""
        return self.num_blocks * self.block_size


def refuse_context_that_does_not_fit(max_model_len: int, context_length: int, pools: tuple[PoolSize, ...]) -> None:
    """Raise ConfigurationError naming both numbers. `max_model_len` 0 asks for nothing, a pool of 0 blocks is not sized yet."""
    if max_model_len > context_length:
        raise ConfigurationError(
            f"--max-model-len {max_model_len} is more than the model's context of {context_length} tokens; lower it"
        )
    for pool in pools:
        if pool.num_blocks and pool.num_tokens < max_model_len:
            needed = blocks_for(max_model_len, pool.block_size)
            raise ConfigurationError(
                f"--max-model-len {max_model_len} does not fit {pool.option} {pool.num_blocks}: {pool.num_blocks} blocks of"
                f" {pool.block_size} tokens hold {pool.num_tokens}; give at least {needed} blocks,"
                f" or --max-model-len {pool.num_tokens} at most"
            )
