"""What parameters do to logits before a token is drawn: one indexed operation for all rows of a pass.

Never: changes the logits that it is given, or a row that asked for nothing.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from kvlease.engine.batch import Draw

Ids = npt.NDArray[np.int64]


def shaped(rows: torch.Tensor, draws: Sequence[Draw]) -> torch.Tensor:
    """`rows` [n, vocabulary] as their draws want them; the very same tensor where none of them wants anything."""
    banned = [(row, _known(draw.banned, rows.shape[1])) for row, draw in enumerate(draws) if draw.banned]
    if not banned:
        return rows
    rows = rows.clone()
    rows[_cells(banned, rows.device)] = -math.inf
    return rows


def _known(token_ids: Iterable[int], vocab_size: int) -> Ids:
    """A model's end tokens may lie beyond its logits, where they are never drawn."""
    return np.array([token_id for token_id in token_ids if token_id < vocab_size], dtype=np.int64)


def _cells(parts: Sequence[tuple[int, Ids]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """The places (row, id) of all parts, to index a tensor with."""
    rows = np.repeat([row for row, _ in parts], [ids.size for _, ids in parts])
    ids = np.concatenate([ids for _, ids in parts])
    return torch.from_numpy(rows).to(device), torch.from_numpy(ids).to(device)
