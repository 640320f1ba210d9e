"""How the next token is drawn, as one value that checks itself.

Never: names a vocabulary: whether a token id exists is judged where the model is known.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from hashlib import blake2b

from kvlease.sampling.limits import Limits

_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is drawn: a pure function of these, the logits, the tokens before it, and the position.

    `temperature` 0 is greedy; `top_p` 1, `top_k` 0, `min_p` 0, a `repetition_penalty` of 1 and other penalties of 0 are off; `seed` is
    a 64-bit number, drawn by the gateway when the client gave none. `logit_bias` has pairs of token id and what is added to its logit,
    each id once. Below `min_tokens` generated tokens no end token is drawn. `top_logprobs`: with each token its likelihood is told, and
    so many of the likeliest; None: neither.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    min_tokens: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    top_logprobs: int | None = None

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
        if not (math.isfinite(self.min_p) and 0.0 <= self.min_p <= 1.0):
            raise ValueError(f"min_p must be between 0 and 1, got {self.min_p}")
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= _LIMITS.max_top_logprobs:
            raise ValueError(f"top_logprobs must be at most {_LIMITS.max_top_logprobs}, got {self.top_logprobs}")
        self._check_penalties()
        self._check_bias()

    def _check_penalties(self) -> None:
        least, most = _LIMITS.min_repetition_penalty, _LIMITS.max_repetition_penalty
        if not least <= self.repetition_penalty <= most:
            raise ValueError(f"repetition_penalty must be between {least} and {most}, got {self.repetition_penalty}")
        for name, penalty in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -_LIMITS.max_penalty <= penalty <= _LIMITS.max_penalty:
                raise ValueError(f"{name}_penalty must be at most {_LIMITS.max_penalty} either way, got {penalty}")

    def _check_bias(self) -> None:
        ids = [token_id for token_id, _ in self.logit_bias]
        if len(ids) > _LIMITS.max_logit_bias:
            raise ValueError(f"logit_bias has {len(ids)} entries, at most {_LIMITS.max_logit_bias} are taken")
        if len(set(ids)) != len(ids) or any(token_id < 0 for token_id in ids):
            raise ValueError("logit_bias names a token twice, or a negative one")
        if not all(-_LIMITS.max_bias <= bias <= _LIMITS.max_bias for _, bias in self.logit_bias):
            raise ValueError(f"a logit_bias is at most {_LIMITS.max_bias} either way")

    @property
    def penalises(self) -> bool:
        """Whether the tokens before matter."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1.0, 0.0, 0.0)

    @property
    def shapes_logits(self) -> bool:
        """Whether any logit is to be changed."""
        return self.penalises or bool(self.logit_bias)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The tokens that it names."""
        return tuple(token_id for token_id, _ in self.logit_bias)

    def for_choice(self, index: int) -> SamplingParams:
        """The same with a seed of its own: each text of a request draws otherwise, the first as if it were alone."""
        if index == 0:
            return self
        message = self.seed.to_bytes(8, "little") + index.to_bytes(8, "little")
        digest = blake2b(message, digest_size=8, person=b"kvlease choice").digest()
        return replace(self, seed=int.from_bytes(digest, "little"))

    def banned(self, end_token_ids: frozenset[int], num_generated: int) -> frozenset[int]:
        """The end tokens, while too little was generated for any of them."""
        return end_token_ids if num_generated < self.min_tokens else frozenset()
