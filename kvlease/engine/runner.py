"""The model with its pool: runs packed steps, and keeps the books on what they wrote.

    pack ─▶ begin_write ─▶ confirm contexts ─▶ forward ─▶ settle ─▶ draw ─▶ record_computed
            slots unproven                     writes KV   complete          slots proven

Whatever goes wrong on the way, the slots of the pass stay unproven.

Never: records a slot before the pass that wrote it is complete, or runs on a context that the ledger has not proven.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path

import torch

from kvlease.engine.attention import Pulse
from kvlease.engine.batch import PackedBatch, SequenceStep, pack
from kvlease.engine.block_attention import BlockAttention
from kvlease.engine.errors import EngineFailed, LogitsNotFinite
from kvlease.engine.limits import Limits
from kvlease.engine.loading import CausalModel, load_model, resolve_device, resolve_dtype
from kvlease.engine.sampling import draw
from kvlease.kvcache.layout import Layout, attention_layout
from kvlease.kvcache.ledger import Occupancy, SlotLedger
from kvlease.kvcache.storage import KVStorage
from kvlease.models.facts import ModelFacts
from kvlease.sampling.tokens import DrawnToken

Drawn = tuple[DrawnToken, ...]

_LIMITS = Limits()


class ModelRunner:
    """One model, one pool and its ledger. For one thread; `pulse` may be read from any."""

    def __init__(self, model: CausalModel, facts: ModelFacts, storage: KVStorage, ledger: SlotLedger) -> None:
        """Join what `load` makes; `storage` and `ledger` describe the same blocks."""
        assert (storage.num_blocks, storage.block_size) == (ledger.num_blocks, ledger.block_size), "two geometries"
        self.facts = facts
        self.storage = storage
        self.ledger = ledger
        self._model = model
        self._pulse = Pulse()

    @classmethod
    def load(cls, folder: Path, *, dtype: str, device: str, num_blocks: int, block_size: int) -> ModelRunner:
        """Load the model of `folder` and make a pool of `num_blocks` for it; raises the first four of `engine.errors`."""
        where = resolve_device(device)
        resolved = resolve_dtype(dtype, device)
        facts = ModelFacts.read(folder)
        model = load_model(folder, facts.family, resolved, where)
        layout = attention_layout(facts.num_layers, facts.num_kv_heads, facts.head_dim, resolved)
        storage = KVStorage(layout, num_blocks, block_size, device)
        return cls(model, facts, storage, SlotLedger(num_blocks, block_size))

    @property
    def layout(self) -> Layout:
        """Of the pool."""
        return self.storage.layout

    @property
    def dtype(self) -> str:
        """Of weights, activations and pool."""
        return self.layout.layers[0][0].dtype

    @property
    def pulse(self) -> int:
        """Grows with each layer that has run."""
        return self._pulse.count

    def run(self, steps: Sequence[SequenceStep]) -> tuple[Drawn, ...]:
        """One forward pass over all the steps' new tokens; the drawn tokens of each step, in the order of its draws.

        Raises `EngineFailed` if the pass did not complete (nothing is proven), `LogitsNotFinite` naming the steps that lack a token
        (all others are complete), `UnprovenSlot` before anything is computed if a context no longer holds.
        """
        batch = pack(steps, self.storage.block_size)
        assert batch.token_ids.size <= _LIMITS.max_step_tokens, f"{batch.token_ids.size} tokens in one pass"
        # On a GPU a token beyond the embedding would end the whole process's use of the device.
        assert 0 <= batch.token_ids.min() <= batch.token_ids.max() < self.facts.vocab_size, (
            "a token outside the vocabulary"
        )
        self._begin(batch)
        tokens = iter(self._compute(batch))
        drawn = [tuple(islice(tokens, len(step.draws))) for step in steps]
        failed = [index for index, found in enumerate(drawn) if None in found]
        self._record(batch, failed)
        results = tuple(tuple(token for token in found if token is not None) for found in drawn)
        if failed:
            raise LogitsNotFinite(failed, results)
        return results

    def _begin(self, batch: PackedBatch) -> None:
        """Unprove what will be written, then check every context: so one step cannot write into what another reads."""
        for step in batch.steps:
            context = step.context
            found = self.ledger.occupancy(context.sequence_id, context.table, context.num_tokens, len(step.token_ids))
            assert found is not Occupancy.FOREIGN, f"sequence {context.sequence_id} would write over another one"
        self.ledger.begin_write(batch.blocks, batch.slots)
        for step in batch.steps:
            step.context.confirm()

    def _compute(self, batch: PackedBatch) -> list[DrawnToken | None]:
        """The tokens of all draws, step by step, once everything that the pass writes is in the storage."""
        device = self.storage.device
        wanted = [batch.sequences[index].last - 1 for index in batch.sampled]
        owners = [row for row, index in enumerate(batch.sampled) for _ in batch.steps[index].draws]
        draws = [draw for step in batch.steps for draw in step.draws]
        places = [step.num_tokens for step in batch.steps for _ in step.draws]
        try:
            with torch.inference_mode():
                output = self._model(
                    input_ids=torch.from_numpy(batch.token_ids).to(device)[None],
                    position_ids=torch.from_numpy(batch.positions).to(device)[None],
                    use_cache=False,
                    logits_to_keep=torch.tensor(wanted, dtype=torch.int64, device=device),
                    attention_step=BlockAttention(self.storage, batch, self._pulse),
                )
                if device.type == "cuda":
                    torch.cuda.synchronize(device)  # errors of a kernel come to light here, not at its launch
                logits = output.logits[0]
                return draw(logits if len(owners) == len(wanted) else logits[owners], draws, places)
        except (RuntimeError, MemoryError) as error:
            raise EngineFailed(f"the forward pass of {batch.token_ids.size} tokens failed: {error}") from error

    def _record(self, batch: PackedBatch, failed: Sequence[int]) -> None:
        for index, (step, place) in enumerate(zip(batch.steps, batch.sequences, strict=True)):
            if index in failed:
                continue
            span = slice(place.first, place.last)
            self.ledger.record_computed(
                step.context.sequence_id, batch.blocks[span], batch.slots[span], batch.positions[span]
            )
