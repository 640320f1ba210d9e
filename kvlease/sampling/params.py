"""How the next token is drawn, as one value that checks itself.

Never: names a vocabulary: whether a token id exists is judged where the model is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvlease.sampling.limits import Limits

_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn: a pure function of these, the logits, the tokens before it, and the position.

    `temperature` 0 is greedy; `top_p` 1, `top_k` 0 and `min_p` 0 are off; `seed` is a 64-bit number, drawn by the gateway when the
    client gave none. Below `min_tokens` generated tokens no end token is drawn.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_tokens: int = 0

    def __post_init__(self) -> None:
        """Refuse what no sampler could use."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0.0):
            raise ValueError(f"temperature must be 0 or more, got {self.temperature}")
        if not (math.isfinite(self.top_p) and 0.0 < self.top_p <= 1.0):
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p}")
        if not 0 <= self.top_k < 2**32:
            raise ValueError(f"top_k must be 0 or more, got {self.top_k}")
        if not 0 <= self.seed < 2**64:
            raise ValueError(f"seed must fit 64 bits, got {self.seed}")
        if not 0 <= self.min_tokens < 2**31:
            raise ValueError(f"min_tokens must be 0 or more, got {self.min_tokens}")

    def banned(self, end_token_ids: frozenset[int], num_generated: int) -> frozenset[int]:
        """The end tokens, while too little was generated for any of them."""
        return end_token_ids if num_generated < self.min_tokens else frozenset()
