"""What is told of a token is bounded, and made of logarithms of probabilities."""

from __future__ import annotations

import math

import pytest

from kvlease.handoff.messages import TokensGenerated
from kvlease.sampling.tokens import TokenLogprobs


@pytest.mark.parametrize("wrong", [0.1, math.nan, -math.inf, math.inf])
def test_a_number_that_is_no_logarithm_of_a_probability_is_refused(wrong: float) -> None:
    with pytest.raises(ValueError, match="logarithm"):
        TokenLogprobs(wrong)
    with pytest.raises(ValueError, match="logarithm"):
        TokenLogprobs(-1.0, ((5, wrong),))


def test_more_alternatives_than_can_be_asked_for_are_refused() -> None:
    TokenLogprobs(-1.0, tuple((token_id, -1.0) for token_id in range(20)))
    with pytest.raises(ValueError, match="at most 20"):
        TokenLogprobs(-1.0, tuple((token_id, -1.0) for token_id in range(21)))


def test_tokens_are_told_of_all_or_none() -> None:
    TokensGenerated((1, 2), (TokenLogprobs(-1.0), TokenLogprobs(-2.0)))
    with pytest.raises(ValueError, match="told of"):
        TokensGenerated((1, 2), (TokenLogprobs(-1.0),))
