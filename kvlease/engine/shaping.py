"""What parameters do to logits before a token is drawn: bias, penalties, bans; one indexed operation each for all rows of a pass.

In this order, for a logit l of a token that was generated c times:

    bias          l + b
    repetition    l / r if l > 0, else l * r         tokens of prompt and output
    presence,     l - p - f * c                      tokens of the output alone
    frequency
    bans          minus infinity

Definitions: repetition as in Keskar et al. 2019 (CTRL), presence and frequency as in OpenAI's reference.

Never: changes the logits that it is given, or a row that asked for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvlease.engine.batch import Draw

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float64]
Part = tuple[Ids, Floats] | None  # token ids of one row, and a number for each
Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def shaped(rows: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """`rows` float32 [n, vocabulary] as their draws want them; the very same tensor where none of them wants anything."""
    if not any(draw.banned or draw.params.shapes_logits for draw in draws):
        return rows
    rows = rows.clone()
    _change(rows, [_bias(draw) for draw in draws], torch.add)
    _change(rows, [_repetition(draw) for draw in draws], _repeated)
    _change(rows, [_occurrence(draw) for draw in draws], torch.sub)
    _change(rows, [_ban(draw, rows.shape[1]) for draw in draws], torch.add)
    return rows


def _bias(draw: Draw) -> Part:
    bias = draw.params.logit_bias
    return _constant([token_id for token_id, _ in bias], np.array([value for _, value in bias])) if bias else None


def _repetition(draw: Draw) -> Part:
    penalty = draw.params.repetition_penalty
    return None if penalty == 1.0 else _constant(draw.known_past.seen(), penalty)


def _occurrence(draw: Draw) -> Part:
    params = draw.params
    if params.presence_penalty == 0.0 == params.frequency_penalty:
        return None
    ids, counts = draw.known_past.generated()
    return ids, params.presence_penalty + params.frequency_penalty * counts.astype(np.float64)


def _ban(draw: Draw, vocab_size: int) -> Part:
    # A model's end tokens may lie beyond its logits, where they are never drawn.
    return (
        _constant([token_id for token_id in draw.banned if token_id < vocab_size], -math.inf) if draw.banned else None
    )


def _constant(ids: Sequence[int] | Ids, value: float | Floats) -> tuple[Ids, Floats]:
    return np.asarray(ids, np.int64), np.broadcast_to(np.asarray(value, np.float64), len(ids))


def _repeated(logits: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    return torch.where(logits > 0, logits / penalties, logits * penalties)


def _change(rows: torch.Tensor, parts: Sequence[Part], change: Change) -> None:
    """`change(logits, numbers)` at the named places. No id comes twice in one row, so no place is written twice."""
    found = [(row, part) for row, part in enumerate(parts) if part is not None]
    if not found:
        return
    at_row = np.repeat([row for row, _ in found], [ids.size for _, (ids, _) in found])
    at_id = np.concatenate([ids for _, (ids, _) in found])
    numbers = np.concatenate([values for _, (_, values) in found]).astype(np.float32)
    places = (torch.from_numpy(at_row).to(rows.device), torch.from_numpy(at_id).to(rows.device))
    rows[places] = change(rows[places], torch.from_numpy(numbers).to(rows.device))
