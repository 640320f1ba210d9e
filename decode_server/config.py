"""The decode server's configuration.

Never: read from flags or the environment here; `kvlease.cli` does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """Everything a decode server needs to run. Sizes in bytes unless named otherwise."""

    model: Path
    secret: str
    prefill_servers: tuple[str, ...]  # gRPC addresses to pair with
    host: str = "127.0.0.1"
    advertise: str = ""  # host at which peers reach this server; empty: `host`
    port: int = 0
    dtype: str = "auto"
    device: str = "cpu"
    block_size: int = 16
    num_blocks: int = 0
    max_model_len: int = 0
    max_queue: int = 256
    max_batch: int = 64
    threads: int = 1
    transport: str = "auto"
    rdma_device: str = ""  # NAME[:PORT[:GID_INDEX]]; empty: the first that can be used
    ring_bytes: int = 32 << 20
