"""Drawing tokens: a pure function of a row of logits, its parameters, its seed, the tokens before it and the position that is drawn.

There is no generator and no state, so a text goes on the same on another server. Arithmetic is in float64, one row at a time.

Never: lets one row's token depend on another row, or turns logits that are not finite into a token.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
import numpy.typing as npt
import torch

from kvlease.engine.batch import Draw
from kvlease.engine.limits import Limits
from kvlease.engine.logprobs import with_logprobs
from kvlease.engine.shaping import shaped
from kvlease.sampling.params import SamplingParams
from kvlease.sampling.tokens import DrawnToken

Floats = npt.NDArray[np.float64]
Ids = npt.NDArray[np.int64]

_LIMITS = Limits()
_MANTISSA_BITS = 53


def draw(logits: torch.Tensor, draws: Sequence[Draw], positions: Sequence[int]) -> list[DrawnToken | None]:
    """One token for each row of `logits` [n, vocabulary]; `positions` are those of the drawn tokens.

    None for a row that has no token: its logits are not finite, by the model or by a penalty on them, or nothing may be drawn from it.
    """
    assert logits.ndim == 2, f"logits have rows and a vocabulary, got {tuple(logits.shape)}"
    assert logits.shape[0] == len(draws) == len(positions), "one draw and one position a row"
    if not draws:
        return []
    rows = logits.float()
    finite = rows.isfinite().all(-1).tolist()
    wanted = shaped(rows, draws)
    highest, ids = wanted.max(-1)
    has_token = [is_finite and math.isfinite(best) for is_finite, best in zip(finite, highest.tolist(), strict=True)]
    best = ids.tolist()
    tokens = [
        None
        if not has_token[i]
        else best[i]
        if draw.params.temperature == 0.0
        else _draw_row(wanted[i], draw.params, positions[i])
        for i, draw in enumerate(draws)
    ]
    return with_logprobs(rows, draws, tokens)


def uniform(seed: int, position: int) -> float:
    """A number in [0, 1), the same for the same seed and position on every machine."""
    message = seed.to_bytes(8, "little") + position.to_bytes(8, "little")
    word = int.from_bytes(blake2b(message, digest_size=8, person=b"kvlease draw").digest(), "little")
    return (word >> (64 - _MANTISSA_BITS)) / float(1 << _MANTISSA_BITS)


def _draw_row(row: torch.Tensor, params: SamplingParams, position: int) -> int:
    logits = row.cpu().numpy().astype(np.float64)
    with np.errstate(over="ignore", under="ignore"):
        # The best logit is taken off first, so that no temperature, however small, can give infinity minus infinity.
        weights = np.exp((logits - logits.max()) / params.temperature)
    if params.min_p > 0.0:
        # The best weight is 1. What has no weight is never picked, so top_k and top_p choose among what is left.
        weights[weights < params.min_p] = 0.0
    chance = uniform(params.seed, position)
    if 0 < params.top_k < weights.size:
        candidates = _best(logits, params.top_k)
        return _pick(candidates, weights[candidates], params.top_p * float(weights[candidates].sum()), chance)
    if params.top_p < 1.0:
        needed = params.top_p * float(weights.sum())
        candidates = _nucleus(logits, weights, needed)
        return _pick(candidates, weights[candidates], needed, chance)
    return _pick(np.arange(weights.size), weights, float(weights.sum()), chance)


def _best(logits: Floats, count: int) -> Ids:
    """Ids of the `count` best tokens, best first, the lower id first among equals."""
    threshold = np.partition(logits, logits.size - count)[logits.size - count]
    candidates = np.flatnonzero(logits >= threshold)
    return candidates[np.argsort(-logits[candidates], kind="stable")][:count]


def _nucleus(logits: Floats, weights: Floats, needed: float) -> Ids:
    """Ids of the best tokens, best first, enough of them to hold the `needed` weight."""
    candidates = _best(logits, min(_LIMITS.nucleus_candidates, logits.size))
    if weights[candidates].sum() >= needed:
        return candidates
    return _best(logits, logits.size)


def _pick(candidates: Ids, weights: Floats, needed: float, chance: float) -> int:
    """The candidate at `chance` of the weight, among the fewest first ones that hold the `needed` weight."""
    sums = np.cumsum(weights)
    # Rounding must lead neither past the end nor to a token of no weight.
    last = int(np.searchsorted(sums, min(needed, float(sums[-1])), side="left"))
    at = int(np.searchsorted(sums, chance * float(sums[last]), side="right"))
    return int(candidates[min(at, last)])
