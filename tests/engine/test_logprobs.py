"""Logarithms of probabilities are the model's own, for each row that asks, and for no other."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.engine.batch import Draw
from kvlease.engine.sampling import draw
from kvlease.sampling.params import SamplingParams

VOCABULARY = 9
rows = st.lists(
    st.lists(st.floats(-30, 30, width=32), min_size=VOCABULARY, max_size=VOCABULARY), min_size=1, max_size=4
)


@settings(max_examples=150, deadline=None)
@given(rows=rows, data=st.data())
def test_each_row_is_told_of_as_it_asked(rows: list[list[float]], data: st.DataObject) -> None:
    asked = st.one_of(st.none(), st.integers(0, 12))
    params = [
        SamplingParams(
            temperature=data.draw(st.sampled_from([0.0, 1.5])),
            logit_bias=((3, 50.0),) if data.draw(st.booleans()) else (),
            top_logprobs=data.draw(asked),
        )
        for _ in rows
    ]
    found = draw(torch.tensor(rows), [Draw(each) for each in params], range(len(rows)))
    for row, each, token in zip(rows, params, found, strict=True):
        assert token is not None
        if each.top_logprobs is None:
            assert token.logprobs is None
            continue
        assert token.logprobs is not None
        best = max(row)
        total = best + math.log(sum(math.exp(logit - best) for logit in row))
        assert token.logprobs.logprob == pytest.approx(row[token.token_id] - total, abs=1e-4)
        ids = [token_id for token_id, _ in token.logprobs.top]
        assert len(set(ids)) == len(ids) == min(each.top_logprobs, VOCABULARY)
        assert [row[token_id] for token_id in ids] == sorted(row, reverse=True)[: len(ids)]
        for token_id, logprob in token.logprobs.top:
            assert logprob == pytest.approx(row[token_id] - total, abs=1e-4)


def test_asking_changes_no_token() -> None:
    logits = torch.randn(50, 64, generator=torch.Generator().manual_seed(1))
    plain, asking = (
        draw(logits, [Draw(SamplingParams(temperature=1.0, seed=3, top_logprobs=top))] * 50, range(50))
        for top in (None, 5)
    )
    assert [token and token.token_id for token in plain] == [token and token.token_id for token in asking]


def test_logits_at_both_ends_of_float32_give_numbers() -> None:
    row = torch.zeros(1, 4)
    row[0, 1], row[0, 2] = 3.3e38, -3.3e38
    [token] = draw(row, [Draw(SamplingParams(logit_bias=((1, -100.0),), top_logprobs=4))], (0,))
    assert token is not None and token.logprobs is not None
    assert all(math.isfinite(logprob) for _, logprob in token.logprobs.top)


def test_a_row_without_a_token_is_told_nothing_of() -> None:
    logits = torch.randn(2, 8)
    logits[0, 3] = math.nan
    none, token = draw(logits, [Draw(SamplingParams(top_logprobs=2))] * 2, (0, 0))
    assert none is None
    assert token is not None and token.logprobs is not None
