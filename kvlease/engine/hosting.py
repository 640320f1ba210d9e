"""The engine as both servers load it: threads bounded, the model, and a pool of the size that was asked for.

Never: knows which server it is for.
"""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from kvlease.engine.loading import resolve_dtype
from kvlease.engine.runner import ModelRunner
from kvlease.engine.threads import set_threads
from kvlease.kvcache.layout import attention_layout
from kvlease.kvcache.sizing import default_num_blocks
from kvlease.models.facts import ModelFacts


class EngineSettings(Protocol):
    """What the engine needs of a server's configuration. `num_blocks` 0: the default for the model."""

    @property
    def model(self) -> Path:
        """The model's folder."""
        ...

    @property
    def dtype(self) -> str:
        """float32, bfloat16 or auto."""
        ...

    @property
    def device(self) -> str:
        """cpu or cuda."""
        ...

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        ...

    @property
    def num_blocks(self) -> int:
        """Blocks of the pool; 0: the default."""
        ...

    @property
    def threads(self) -> int:
        """Intra-op threads."""
        ...


def load_engine(settings: EngineSettings) -> ModelRunner:
    """The model and its pool; raises what `ModelRunner.load` and `ModelFacts.read` raise."""
    set_threads(settings.threads)
    dtype = resolve_dtype(settings.dtype, settings.device)
    num_blocks = settings.num_blocks or _default_num_blocks(settings, dtype)
    return ModelRunner.load(
        settings.model, dtype=dtype, device=settings.device, num_blocks=num_blocks, block_size=settings.block_size
    )


def _default_num_blocks(settings: EngineSettings, dtype: str) -> int:
    facts = ModelFacts.read(settings.model)
    layout = attention_layout(facts.num_layers, facts.num_kv_heads, facts.head_dim, dtype)
    return default_num_blocks(facts.context_length, settings.block_size, layout.token_bytes)
