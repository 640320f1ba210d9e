"""How many blocks a server makes."""

from __future__ import annotations

import pytest

from kvlease.kvcache.sizing import blocks_for, default_num_blocks


@pytest.mark.parametrize(
    ("num_tokens", "block_size", "expected"), [(0, 16, 0), (1, 16, 1), (16, 16, 1), (17, 16, 2), (5, 1, 5)]
)
def test_blocks_for_rounds_up(num_tokens: int, block_size: int, expected: int) -> None:
    assert blocks_for(num_tokens, block_size) == expected


def test_four_contexts_fit_by_default() -> None:
    assert default_num_blocks(1000, 16, 100) == 4 * 63


def test_the_budget_bounds_the_pool() -> None:
    assert default_num_blocks(1000, 16, 100, budget_bytes=100 * 1600 + 1599) == 100
    assert default_num_blocks(1000, 16, 100, budget_bytes=1) == 1
    assert default_num_blocks(8192, 16, 46080) * 16 * 46080 <= 2 << 30
