"""A drawn token, and what is told of it.

Never: holds text; what a token is called is the gateway's to say.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from kvlease.sampling.limits import Limits

_LIMITS = Limits()


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """How likely the model itself held a token: natural logarithms, before bias, penalties and temperature.

    `top`: the likeliest tokens, best first, as pairs of id and logarithm; the drawn token need not be among them.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()

    def __post_init__(self) -> None:
        """Refuse what is no logarithm of a probability, and more than anybody can have asked for."""
        if len(self.top) > _LIMITS.max_top_logprobs:
            raise ValueError(
                f"{len(self.top)} alternatives to a token, at most {_LIMITS.max_top_logprobs} can be asked for"
            )
        if not all(-math.inf < value <= 0.0 for value in (self.logprob, *(logprob for _, logprob in self.top))):
            raise ValueError("a logarithm of a probability is finite and not above 0")


@dataclass(frozen=True, slots=True)
class DrawnToken:
    """One token of the answer; `logprobs` where they were asked for."""

    token_id: int
    logprobs: TokenLogprobs | None = None
