"""An engine without a model: what it writes for a token tells the token and its position, and what it draws depends on all that it reads.

Everything around the computation is the shipped runner's: contexts, ledger, storage. A foreign, stale or misplaced block changes the text. Where a
model is too slow to be believed alive (an emulated machine), this one is not.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from kvlease.engine.batch import PackedBatch
from kvlease.engine.runner import ModelRunner
from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.ledger import SlotLedger
from kvlease.kvcache.storage import KVStorage
from kvlease.models.facts import ModelFacts
from kvlease.sampling.tokens import DrawnToken

_FIRST_TOKEN, _NUM_TOKENS, _PRIME = 10, 190, 997


def toy_text(prompt: Sequence[int], max_tokens: int) -> tuple[int, ...]:
    """What the toy engine writes behind a prompt."""
    tokens = list(prompt)
    for _ in range(max_tokens):
        tokens.append(_next([_value(token, position) for position, token in enumerate(tokens)]))
    return tuple(tokens[len(prompt) :])


class ToyRunner(ModelRunner):
    """The shipped runner, with another forward pass."""

    @classmethod
    def make(cls, folder: Path, num_blocks: int, block_size: int = 16) -> ToyRunner:
        """Of the shape of the model in `folder`, whose weights are not read."""
        facts = ModelFacts.read(folder)
        layout = attention_layout(facts.num_layers, facts.num_kv_heads, facts.head_dim, "float32")
        storage = KVStorage(layout, num_blocks, block_size)
        return cls(cast("Any", None), facts, storage, SlotLedger(num_blocks, block_size))

    def _compute(self, batch: PackedBatch) -> list[DrawnToken | None]:
        pairs = zip(batch.token_ids.tolist(), batch.positions.tolist(), strict=True)
        values = torch.tensor([_value(token, position) for token, position in pairs], dtype=torch.float32)
        blocks, slots = torch.from_numpy(batch.blocks), torch.from_numpy(batch.slots)
        for layer, arrays in enumerate(self.layout.layers):
            for spec in arrays:
                self.storage.array(layer, spec.name)[blocks, slots] = values[:, None, None]
            self._pulse.count += 1
        drawn: list[DrawnToken | None] = []
        for index in batch.sampled:
            place = batch.sequences[index]
            token = _next(self._read(torch.from_numpy(place.table), place.num_tokens))
            drawn += [DrawnToken(token)] * len(batch.steps[index].draws)
        return drawn

    def _read(self, table: torch.Tensor, num_tokens: int) -> list[int]:
        """The values of a whole context, which must be the same in every array."""
        found = [
            self.storage.array(layer, spec.name)[table].flatten(0, 1)[:num_tokens].flatten(1)
            for layer, arrays in enumerate(self.layout.layers)
            for spec in arrays
        ]
        values = torch.cat(found, dim=1)
        assert bool((values == values[:, :1]).all()), "the arrays of a slot disagree"
        return [int(value) for value in values[:, 0].tolist()]


def _value(token: int, position: int) -> int:
    return (31 * token + 7 * position) % _PRIME + 1


def _next(values: Sequence[int]) -> int:
    total = sum((place + 1) * value for place, value in enumerate(values))
    return _FIRST_TOKEN + total % _NUM_TOKENS
