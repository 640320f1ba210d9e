"""How likely the model held the tokens that were drawn, and which ones it held likeliest.

Never: looks at a row that did not ask, or at logits that parameters have changed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvlease.engine.batch import Draw
from kvlease.sampling.tokens import DrawnToken, TokenLogprobs


def with_logprobs(
    rows: torch.Tensor, draws: Sequence[Draw], token_ids: Sequence[int | None]
) -> list[DrawnToken | None]:
    """The drawn tokens (None: none was drawn) with what their draws ask for; `rows` float32 [n, vocabulary] are the model's own logits."""
    asking = {
        row: draw.params.top_logprobs
        for row, (draw, token_id) in enumerate(zip(draws, token_ids, strict=True))
        if draw.params.top_logprobs is not None and token_id is not None
    }
    found = _read(rows, asking, token_ids) if asking else {}
    return [
        None if token_id is None else DrawnToken(token_id, found.get(row)) for row, token_id in enumerate(token_ids)
    ]


def _read(rows: torch.Tensor, asking: dict[int, int], token_ids: Sequence[int | None]) -> dict[int, TokenLogprobs]:
    """For each asking row; `asking` has how many alternatives it wants."""
    # Logits at both ends of float32 would give minus infinity, and rounding could give more than 0.
    logprobs = rows[list(asking)].log_softmax(-1).clamp_(torch.finfo(torch.float32).min, 0.0)
    drawn = torch.tensor([token_ids[row] for row in asking], device=rows.device)
    own = logprobs.gather(1, drawn[:, None])[:, 0].tolist()
    # Ranked by logits: what they differ in may be lost in the logarithms' rounding.
    best = rows[list(asking)].topk(min(max(asking.values()), rows.shape[1]), -1).indices
    values, ids = logprobs.gather(1, best).tolist(), best.tolist()
    return {
        row: TokenLogprobs(own[place], tuple(zip(ids[place][:count], values[place][:count], strict=True)))
        for place, (row, count) in enumerate(asking.items())
    }
