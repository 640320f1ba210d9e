"""How many blocks a server needs.

Never: looks at the machine; the memory budget is an argument.
"""

from __future__ import annotations

from kvlease.kvcache.limits import DEFAULT_LIMITS


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` tokens."""
    assert num_tokens >= 0, f"{num_tokens} tokens"
    assert block_size > 0, f"blocks of {block_size} tokens"
    return -(-num_tokens // block_size)


def choice_blocks(num_prompt_tokens: int, max_tokens: int, num_choices: int, block_size: int) -> tuple[int, ...]:
    """Blocks that each of several texts of one prompt holds: the first one all of its own, the others all but the prompt's whole blocks."""
    whole = blocks_for(num_prompt_tokens + max_tokens, block_size)
    return (whole, *([whole - num_prompt_tokens // block_size] * (num_choices - 1)))


def default_num_blocks(
    context_length: int,
    block_size: int,
    token_bytes: int,
    *,
    budget_bytes: int = DEFAULT_LIMITS.default_pool_bytes,
    num_contexts: int = DEFAULT_LIMITS.default_contexts,
) -> int:
    """Blocks for `num_contexts` whole contexts, or as many as `budget_bytes` hold if that is less; at least one.

    `token_bytes` is `Layout.token_bytes`. When the budget holds less than one context the caller advertises what fits.
    """
    assert context_length > 0, f"a context of {context_length} tokens"
    assert token_bytes > 0, f"{token_bytes} bytes a token"
    wanted = num_contexts * blocks_for(context_length, block_size)
    affordable = budget_bytes // (token_bytes * block_size)
    return max(1, min(wanted, affordable))
