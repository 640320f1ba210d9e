"""Parameters that no sampler could use cannot be made."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest

from kvlease.sampling.params import SamplingParams

SEED_5_1 = 5386070081863125828


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", math.nan),
        ("temperature", -0.1),
        ("temperature", math.inf),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -1),
        ("seed", 2**64),
        ("min_tokens", -1),
        ("min_tokens", 2**31),
        ("top_logprobs", 21),
        ("top_logprobs", -1),
        ("min_p", 1.1),
        ("min_p", math.nan),
        ("repetition_penalty", 0.0),
        ("repetition_penalty", math.inf),
        ("presence_penalty", 2.1),
        ("frequency_penalty", -2.1),
        ("frequency_penalty", math.nan),
        ("logit_bias", ((1, 101.0),)),
        ("logit_bias", ((1, math.nan),)),
        ("logit_bias", ((1, 1.0), (1, 2.0))),
        ("logit_bias", ((-1, 1.0),)),
        ("logit_bias", tuple((token_id, 1.0) for token_id in range(1025))),
    ],
)
def test_parameters_that_no_sampler_could_use_are_refused(name: str, value: object) -> None:
    fields: dict[str, Any] = {name: value}
    with pytest.raises(ValueError, match=name):
        SamplingParams(**fields)


def test_each_choice_has_a_seed_of_its_own_and_the_first_the_requests() -> None:
    params = SamplingParams(temperature=1.0, seed=5)
    choices = [params.for_choice(index) for index in range(16)]
    assert choices[0] == params
    assert len({choice.seed for choice in choices}) == 16
    assert {replace(choice, seed=5) for choice in choices} == {params}
    # Computed once; another number would change the texts of every cluster.
    assert choices[1].seed == SEED_5_1


def test_end_tokens_are_banned_while_too_little_was_generated() -> None:
    ends = frozenset({2, 7})
    params = SamplingParams(min_tokens=3)
    assert [params.banned(ends, num_generated) for num_generated in range(4)] == [ends, ends, ends, frozenset()]
    assert SamplingParams().banned(ends, 0) == frozenset()
