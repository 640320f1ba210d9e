"""Bias and penalties are what their definitions say, for every row of a batch at once."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.engine.batch import Draw
from kvlease.engine.past import PastTokens, PromptTokens
from kvlease.engine.sampling import draw
from kvlease.engine.shaping import shaped
from kvlease.sampling.params import SamplingParams
from tests.plain_sampling import plain_candidates, plain_logits

VOCABULARY = 12
token_ids = st.integers(0, VOCABULARY - 1)
logits = st.lists(st.floats(-20, 20, width=32), min_size=VOCABULARY, max_size=VOCABULARY)
penalties = st.one_of(st.just(0.0), st.floats(-2, 2))
params = st.builds(
    SamplingParams,
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.5, 2.0)),
    presence_penalty=penalties,
    frequency_penalty=penalties,
    logit_bias=st.dictionaries(token_ids, st.floats(-100, 100), max_size=4).map(lambda bias: tuple(bias.items())),
)


class Row(NamedTuple):
    logits: list[float]
    prompt: list[int]
    output: list[int]
    params: SamplingParams
    banned: frozenset[int]

    def draw(self) -> Draw:
        return Draw(self.params, self.banned, past_of(self.prompt, self.output))


rows = st.builds(
    Row, logits, st.lists(token_ids, min_size=1, max_size=8), st.lists(token_ids, max_size=8), params,
    st.frozensets(st.integers(0, VOCABULARY + 3), max_size=3),
)  # fmt: skip


def past_of(prompt: list[int], output: list[int]) -> PastTokens:
    past = PastTokens(PromptTokens(prompt))
    for token_id in output:
        past.add(token_id)
    return past


@settings(max_examples=300, deadline=None)
@given(st.lists(rows, min_size=1, max_size=5))
def test_every_row_is_changed_by_its_own_parameters_as_defined(batch: list[Row]) -> None:
    given_logits = torch.tensor([row.logits for row in batch])
    kept = given_logits.clone()
    found = shaped(given_logits, [row.draw() for row in batch])
    for row, changed in zip(batch, found.tolist(), strict=True):
        wanted = plain_logits(row.logits, row.prompt, row.output, row.params)
        for token_id, (value, expected) in enumerate(zip(changed, wanted, strict=True)):
            if token_id in row.banned:
                assert value == -torch.inf
            else:
                assert value == pytest.approx(expected, rel=1e-5, abs=1e-4)
    assert torch.equal(given_logits, kept)


@given(logits)
def test_what_asks_for_nothing_is_not_even_copied(row: list[float]) -> None:
    tensor = torch.tensor([row])
    assert shaped(tensor, [Draw(SamplingParams(temperature=1.0, top_p=0.5))]) is tensor


@settings(max_examples=100, deadline=None)
@given(
    row=logits,
    wanted=st.builds(
        SamplingParams,
        temperature=st.floats(0.3, 2.0),
        min_p=st.one_of(st.just(0.0), st.just(1.0), st.floats(0, 1)),
        top_k=st.integers(0, VOCABULARY),
        top_p=st.one_of(st.just(1.0), st.floats(0.01, 1)),
        seed=st.integers(0, 2**64 - 1),
    ),
)
def test_only_candidates_are_drawn(row: list[float], wanted: SamplingParams) -> None:
    tensor = torch.tensor([row]).expand(60, -1)
    found = draw(tensor, [Draw(wanted)] * 60, range(60))
    assert {token.token_id for token in found if token is not None} <= {*plain_candidates(row, wanted)}


def test_min_p_keeps_exactly_what_is_likely_enough() -> None:
    row = torch.tensor([0.5, 0.26, 0.14, 0.1]).log()
    drawn = draw(row.expand(400, -1), [Draw(SamplingParams(temperature=1.0, min_p=0.27))] * 400, range(400))
    counts = Counter(token.token_id for token in drawn if token is not None)
    assert set(counts) == {0, 1, 2}
    # The heat makes the unlikely likelier before it is judged.
    hot = draw(row.expand(400, -1), [Draw(SamplingParams(temperature=2.0, min_p=0.27))] * 400, range(400))
    assert {token.token_id for token in hot if token is not None} == {0, 1, 2, 3}


def test_a_penalty_without_the_tokens_before_is_a_mistake_of_ours() -> None:
    with pytest.raises(AssertionError, match="tokens before"):
        Draw(SamplingParams(presence_penalty=0.5))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_penalty_that_makes_a_logit_infinite_gives_no_token_to_its_row_alone(temperature: float) -> None:
    rows = torch.zeros(2, VOCABULARY)
    rows[:, 3] = 1e38
    wanted = SamplingParams(temperature=temperature, repetition_penalty=0.01)
    broken, healthy = draw(rows, [Draw(wanted, past=past_of([3], [])), Draw(wanted, past=past_of([4], []))], (0, 0))
    assert broken is None
    assert healthy is not None and healthy.token_id == 3
