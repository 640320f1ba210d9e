"""Facts of drawing tokens."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvlease.engine.batch import Draw
from kvlease.engine.sampling import _pick, draw, uniform
from kvlease.sampling.params import SamplingParams

VOCABULARY = 50
#: Computed once; another number would change every sampled text of every cluster.
UNIFORM_0_0 = 0.03497529912388153
UNIFORM_MAX_7 = 0.9917347338726376


def logits_of(seed: int, rows: int = 1, vocabulary: int = VOCABULARY) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * 3


def sample(logits: torch.Tensor, specs: Sequence[SamplingParams], positions: Sequence[int]) -> list[int]:
    """Where every row has a token."""
    drawn = draw(logits, [Draw(spec) for spec in specs], positions)
    return [token.token_id for token in drawn if token is not None]


def drawn(row: torch.Tensor, spec: SamplingParams, count: int) -> Counter[int]:
    return Counter(sample(row.expand(count, -1), [spec] * count, range(count)))


specs = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.floats(1e-320, 1e-3), st.floats(0.1, 5.0)),
    top_p=st.one_of(st.just(1.0), st.floats(1e-9, 1.0)),
    top_k=st.integers(0, 2 * VOCABULARY),
    seed=st.integers(0, 2**64 - 1),
)


def test_temperature_zero_is_the_best_token() -> None:
    logits = logits_of(1, rows=5)
    assert sample(logits, [SamplingParams(seed=9)] * 5, range(5)) == logits.argmax(-1).tolist()


def test_the_uniform_number_is_fixed_for_all_time() -> None:
    assert [uniform(0, 0), uniform(2**64 - 1, 7)] == pytest.approx([UNIFORM_0_0, UNIFORM_MAX_7], abs=0)


def test_uniform_numbers_are_uniform_over_seeds_and_positions() -> None:
    for numbers in ([uniform(3, i) for i in range(4000)], [uniform(i, 3) for i in range(4000)]):
        counts = Counter(int(number * 10) for number in numbers)
        assert (
            sum((counts[i] - 400) ** 2 / 400 for i in range(10)) < 27.9
        )  # chi square, nine degrees: one in a thousand


def test_plain_sampling_follows_the_softmax() -> None:
    row = logits_of(2, vocabulary=8)
    count = 4000
    found = drawn(row, SamplingParams(temperature=2.0), count)
    wanted = torch.softmax(row[0].double() / 2.0, -1).tolist()
    assert sum((found[i] - count * p) ** 2 / (count * p) for i, p in enumerate(wanted)) < 24.3  # seven degrees


def test_top_k_draws_from_the_best_k_alone_and_from_all_of_them() -> None:
    row = logits_of(3)
    assert set(drawn(row, SamplingParams(temperature=5.0, top_k=4), 400)) == set(row[0].topk(4).indices.tolist())


def test_equal_logits_at_the_edge_of_top_k_favour_the_lower_id() -> None:
    # Two values over two hundred ids: long enough that a sort which does not keep the order of equals shows.
    row = (torch.arange(200) % 2).float()[None]
    wanted = {*range(1, 200, 2), *range(0, 20, 2)}
    assert set(drawn(row, SamplingParams(temperature=5.0, top_k=110), 3000)) == wanted


def test_top_p_draws_from_the_fewest_tokens_that_hold_it() -> None:
    row = torch.tensor([[0.5, 0.25, 0.15, 0.1]]).log()
    assert set(drawn(row, SamplingParams(temperature=1.0, top_p=0.75), 300)) == {0, 1}
    assert set(drawn(row, SamplingParams(temperature=1.0, top_p=0.751), 300)) == {0, 1, 2}


def test_top_p_counts_what_top_k_has_left() -> None:
    row = torch.tensor([[0.4, 0.2, 0.2, 0.2]]).log()
    # Of the two best alone, 0.66 of the weight is the first one.
    assert set(drawn(row, SamplingParams(temperature=1.0, top_k=2, top_p=0.6), 200)) == {0}


def test_a_nucleus_wider_than_the_first_guess_is_found_whole() -> None:
    row = torch.zeros(1, 4096)
    found = drawn(row, SamplingParams(temperature=1.0, top_p=0.75), 3000)
    assert max(found) in range(3000, 3072)


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1000), spec=specs, position=st.integers(0, 10**6), others=st.lists(specs, max_size=4))
def test_a_row_draws_the_same_token_in_any_company(
    seed: int, spec: SamplingParams, position: int, others: Sequence[SamplingParams]
) -> None:
    logits = logits_of(seed, rows=len(others) + 1)
    alone = sample(logits[-1:], [spec], [position])
    assert alone == sample(logits, [*others, spec], [*range(len(others)), position])[-1:]


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 1000), spec=specs, position=st.integers(0, 10**6))
def test_a_token_is_always_one_of_the_vocabulary_with_weight(seed: int, spec: SamplingParams, position: int) -> None:
    logits = logits_of(seed) * 100
    (token,) = sample(logits, [spec], [position])
    assert 0 <= token < VOCABULARY
    if spec.temperature <= 1e-3:
        assert token == int(logits.argmax())


def test_a_token_without_weight_is_not_drawn_by_the_lowest_chance_nor_by_the_highest() -> None:
    ids, weights = np.arange(4), np.array([0.0, 0.1, 0.2, 0.0])
    # A sum taken in another order may be larger than the running one.
    assert [_pick(ids, weights, 0.3000001, chance) for chance in (0.0, 1.0)] == [1, 2]


def test_seed_and_position_change_the_token() -> None:
    row = torch.zeros(1, 4096)
    spec = SamplingParams(temperature=1.0, seed=1)
    tokens = {sample(row, [s], [p])[0] for s, p in ((spec, 0), (spec, 1), (SamplingParams(1.0, seed=2), 0))}
    assert len(tokens) == 3


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("spec", [SamplingParams(), SamplingParams(temperature=1.0), SamplingParams(1.0, top_k=3)])
def test_logits_that_are_not_finite_give_no_token(bad: float, spec: SamplingParams) -> None:
    logits = logits_of(4, rows=3)
    logits[1, 17] = bad
    drawn = draw(logits, [Draw(spec)] * 3, range(3))
    healthy = draw(logits[[0, 2]], [Draw(spec)] * 2, (0, 2))
    assert None not in healthy
    assert drawn == [healthy[0], None, healthy[1]]


def test_no_rows_give_no_tokens() -> None:
    assert draw(torch.empty(0, VOCABULARY), [], []) == []


def test_bfloat16_logits_are_drawn_from_as_they_are() -> None:
    row = logits_of(5).bfloat16()
    spec = SamplingParams(temperature=1.0)
    assert sample(row, [spec], [3]) == sample(row.float(), [spec], [3])


@pytest.mark.parametrize("params", [SamplingParams(), SamplingParams(temperature=2.0, seed=5)])
def test_a_banned_token_is_never_drawn_and_the_next_best_one_is(params: SamplingParams) -> None:
    logits = logits_of(6, rows=2)
    best, second = logits[0].topk(2).indices.tolist()
    tokens = {draw(logits, [Draw(params, frozenset({best})), Draw(params)], (i, i))[0] for i in range(200)}
    found = {token.token_id for token in tokens if token is not None}
    assert best not in found
    assert second in found


def test_a_ban_touches_no_other_row_and_not_the_logits() -> None:
    logits = logits_of(7, rows=2)
    kept = logits.clone()
    best = logits.argmax(-1).tolist()
    drawn = draw(logits, [Draw(SamplingParams(), frozenset(best)), Draw(SamplingParams())], (0, 0))
    assert drawn[1] == draw(logits, [Draw(SamplingParams())] * 2, (0, 0))[1]
    assert torch.equal(logits, kept)


def test_an_end_token_beyond_the_logits_bans_nothing_and_a_ban_on_everything_gives_no_token() -> None:
    row = logits_of(8)
    [free] = draw(row, [Draw(SamplingParams())], (0,))
    assert draw(row, [Draw(SamplingParams(), frozenset({VOCABULARY, 10**6}))], (0,)) == [free]
    assert draw(row, [Draw(SamplingParams(temperature=1.0), frozenset(range(VOCABULARY)))], (0,)) == [None]
