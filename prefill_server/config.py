"""The prefill server's configuration.

Never: read from flags or the environment here; `kvlease.cli` does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Everything a prefill server needs to run. Sizes in bytes unless named otherwise."""

    model: Path
    secret: str
    host: str = "127.0.0.1"
    advertise: str = ""  # host at which peers reach this server; empty: `host`
    port: int = 0  # of gRPC; 0: any free one, printed
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    num_blocks: int = 0  # 0: enough for `max_queue_contexts` whole contexts, see kvlease.kvcache.sizing
    max_model_len: int = 0  # 0: whatever fits
    max_queue: int = 256
    chunk_tokens: int = 512
    threads: int = 1
    transport: str = "auto"
    rdma_device: str = ""  # NAME[:PORT[:GID_INDEX]]; empty: the first that can be used
    ring_bytes: int = 32 << 20
