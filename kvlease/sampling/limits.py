"""Named limits of what a request may ask of the drawing of its tokens.

Never: read from configuration; both servers of a pair and the gateway must refuse the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on what one request makes each of its tokens cost, in memory and in time."""

    #: Entries of a logit bias. OpenAI's own interface takes 300; each costs an addition a token.
    max_logit_bias: int = 1024
    #: How far a bias may move a logit, as OpenAI has it: 100 decides every draw of a real model.
    max_bias: float = 100.0
    #: Alternatives told with each token, as OpenAI has it. Each is a dozen bytes a token on every hop.
    max_top_logprobs: int = 20
    #: Of presence and frequency penalties, either way, as OpenAI has it.
    max_penalty: float = 2.0
    #: Of the repetition penalty. Beyond, a float32 logit could overflow; 1 is off, and nobody uses more than 2.
    min_repetition_penalty: float = 0.01
    max_repetition_penalty: float = 100.0
