"""The seam between a model's layers and the attention that runs over blocks.

`transformers` calls `_attend` in every layer; it finds the pass's own `AttentionStep` among the keyword arguments that the models hand
through, and leaves everything else to it. A better attention is another class with the same `attend`.

Never: holds a batch, a storage or anything else of its own between two calls.
"""

from __future__ import annotations

from typing import Protocol

import torch

ATTENTION_NAME = "kvlease"


class Pulse:
    """How many layers have run, for a watcher in another thread: one that stands still while a pass runs is stuck."""

    def __init__(self) -> None:
        """Nothing has run."""
        self.count = 0


class AttentionStep(Protocol):
    """Attention of one forward pass over every layer."""

    @property
    def pulse(self) -> Pulse:
        """Grows by one for each layer."""

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """`query` [1, heads, num_tokens, dim], `key` and `value` [1, kv_heads, num_tokens, dim] of the new tokens -> [1, num_tokens, heads, dim]."""


class AttentionLayer(Protocol):
    """What we use of a model's attention module."""

    layer_idx: int


def register_attention() -> None:
    """Make `ATTENTION_NAME` known to `transformers`. No mask is made for it: the step knows what every token may see."""
    from transformers import AttentionInterface  # noqa: PLC0415  the loader sets its environment first

    AttentionInterface.register(ATTENTION_NAME, _attend)


def _attend(  # noqa: PLR0913  the signature that models call
    module: AttentionLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float,
    attention_step: AttentionStep,
    **_ignored: object,  # dropout, a sliding window known to be inactive, positions
) -> tuple[torch.Tensor, None]:
    assert attention_mask is None, "the packed row has no mask of its own"
    output = attention_step.attend(module.layer_idx, query, key, value, scaling)
    attention_step.pulse.count += 1
    return output, None
