"""The gateway's configuration.

Never: read from flags or the environment here; `kvlease.cli` does that.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class GatewayConfig:
    """Everything a gateway needs to run. Times in seconds, sizes in bytes."""

    model: Path  # a prepared model folder
    secret: str
    prefill_servers: tuple[str, ...]  # gRPC addresses, host:port
    decode_servers: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 8000
    served_model_name: str = ""  # empty: the folder's name
    max_model_len: int = 0  # 0: whatever fits the pools
    default_max_tokens: int = 512
    deadline_s: float = 600.0
    api_keys: tuple[tuple[str, str], ...] = ()  # (key, tenant); empty: no key is asked for, one tenant `default`
