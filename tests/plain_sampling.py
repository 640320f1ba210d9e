"""The definitions of sampling parameters, in plain Python and float64: what the engine's arrays are compared with.

Never: shares a line with the engine.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence

from kvlease.sampling.params import SamplingParams


def plain_logits(
    logits: Sequence[float], prompt: Sequence[int], output: Sequence[int], params: SamplingParams
) -> list[float]:
    """Bias, then the repetition penalty over prompt and output, then presence and frequency over the output."""
    changed = []
    for token_id, logit in enumerate(logits):
        value = logit
        for biased, bias in params.logit_bias:
            if biased == token_id:
                value += bias
        if token_id in prompt or token_id in output:
            value = value / params.repetition_penalty if value > 0 else value * params.repetition_penalty
        num_times = sum(1 for other in output if other == token_id)
        if num_times > 0:
            value -= params.presence_penalty
        value -= params.frequency_penalty * num_times
        changed.append(value)
    return changed


def plain_candidates(logits: Sequence[float], params: SamplingParams) -> list[int]:
    """The ids that may be drawn, best first: those likely enough, of these the best k, of these the fewest that hold p."""
    best = max(logits)
    weights = [math.exp((logit - best) / params.temperature) for logit in logits]
    ids = [token_id for token_id in range(len(logits)) if weights[token_id] >= params.min_p]
    ids.sort(key=lambda token_id: (-logits[token_id], token_id))
    if params.top_k:
        ids = ids[: params.top_k]
    needed = params.top_p * sum(weights[token_id] for token_id in ids)
    chosen: list[int] = []
    while sum(weights[token_id] for token_id in chosen) < needed:
        chosen.append(ids[len(chosen)])
    return chosen


def plain_gap(logits: Sequence[float], token_id: int, banned: Collection[int] = ()) -> float:
    """How far a token is below the best one that is allowed; infinite for one that is not."""
    if token_id in banned:
        return math.inf
    return max(value for other, value in enumerate(logits) if other not in banned) - logits[token_id]
