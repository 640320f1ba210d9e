"""Attention over the blocks of a private pool: new keys and values go into their slots first, then each sequence reads its own context.

    storage.array(layer, "k")   [num_blocks, block_size, kv_heads, dim]
                                 ├─ consecutive blocks: a view, copied in one piece for a single token on a CPU
                                 └─ others: whole blocks gathered, then cut to the context's length

Everything that depends on the batch alone is prepared once for the pass; a layer does one indexed write for all new
tokens, and one attention call for each sequence.

Never: reads a slot beyond a sequence's own tokens into a result, or decides which blocks may be read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from kvlease.engine.attention import Pulse
from kvlease.engine.batch import PackedBatch, PackedSequence
from kvlease.kvcache.storage import KVStorage


@dataclass(frozen=True, slots=True)
class _SequenceView:
    """Where one sequence's tokens are in the row, and its context in the storage."""

    first: int
    last: int
    num_tokens: int
    first_slot: int  # of a consecutive table
    blocks: torch.Tensor | None  # [blocks]: the table to gather by; None when it is consecutive
    mask: torch.Tensor | None  # bool [new, num_tokens]; None when all or exactly the causal part is visible
    is_causal: bool
    is_copied: bool

    @classmethod
    def of(cls, sequence: PackedSequence, block_size: int, device: torch.device) -> _SequenceView:
        blocks = None if sequence.is_consecutive else torch.from_numpy(sequence.table).to(device)
        mask = None
        if sequence.num_new > 1 and not sequence.is_whole:
            mask = torch.ones(sequence.num_new, sequence.num_tokens, dtype=torch.bool, device=device)
            mask.tril_(sequence.num_tokens - sequence.num_new)
        first_slot = int(sequence.table[0]) * block_size
        is_causal = sequence.num_new > 1 and sequence.is_whole
        # A single token reads its context once, and a CPU reads it a quarter faster in the order of its addresses than head by head:
        # the copy is in the cache when the heads come for it.
        is_copied = sequence.num_new == 1 and device.type == "cpu"
        return cls(sequence.first, sequence.last, sequence.num_tokens, first_slot, blocks, mask, is_causal, is_copied)

    def context(self, array: torch.Tensor) -> torch.Tensor:
        """`array` [num_blocks, block_size, kv_heads, dim] -> [1, kv_heads, num_tokens, dim]."""
        if self.blocks is None:
            tokens = array.flatten(0, 1)[self.first_slot : self.first_slot + self.num_tokens]
            if self.is_copied:
                tokens = tokens.clone()
        else:
            tokens = array.index_select(0, self.blocks).flatten(0, 1)[: self.num_tokens]
        return tokens.transpose(0, 1).unsqueeze(0)


class BlockAttention:
    """The attention of one forward pass. Implements `attention.AttentionStep`."""

    def __init__(self, storage: KVStorage, batch: PackedBatch, pulse: Pulse) -> None:
        """Prepare the indices and masks of `batch` on the storage's device."""
        self._storage = storage
        self._pulse = pulse
        self._write_slots = torch.from_numpy(batch.blocks * storage.block_size + batch.slots).to(storage.device)
        self._views = tuple(_SequenceView.of(s, storage.block_size, storage.device) for s in batch.sequences)

    @property
    def pulse(self) -> Pulse:
        """Shared by all passes of a runner."""
        return self._pulse

    def attend(
        self, layer: int, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scaling: float
    ) -> torch.Tensor:
        """Write this layer's new keys and values, then attend. Shapes as in `AttentionStep`."""
        keys, values = self._storage.array(layer, "k"), self._storage.array(layer, "v")
        keys.flatten(0, 1).index_copy_(0, self._write_slots, key[0].transpose(0, 1))
        values.flatten(0, 1).index_copy_(0, self._write_slots, value[0].transpose(0, 1))
        _, num_heads, num_tokens, dim = query.shape
        output = query.new_empty((1, num_tokens, num_heads, dim))
        for view in self._views:
            attended = _attend_one(
                query[:, :, view.first : view.last], view.context(keys), view.context(values), view, scaling
            )
            output[:, view.first : view.last] = attended
        return output


def _attend_one(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, view: _SequenceView, scaling: float
) -> torch.Tensor:
    """[1, heads, new, dim] over [1, kv_heads, num_tokens, dim] -> [1, new, heads, dim]."""
    num_heads, dim = query.shape[1], query.shape[3]
    if view.last - view.first == 1:
        # One token sees everything, so the heads that share a KV head can be its rows: one pass over the context for all of them.
        rows = query.reshape(1, keys.shape[1], -1, dim)
        return scaled_dot_product_attention(rows, keys, values, scale=scaling).reshape(1, 1, num_heads, dim)
    attended = scaled_dot_product_attention(
        query, keys, values, attn_mask=view.mask, is_causal=view.is_causal, scale=scaling, enable_gqa=True
    )
    return attended.transpose(1, 2)
