"""The bounds of the exploration, stated: every run of these worlds is walked to its end.

Everywhere: pools of three blocks of two tokens, a landing ring of two slots, chunks of two tokens, two attempts at a request, each
server crashing at most once. A long prompt takes two chunks and two blocks at prefill and all three blocks at decode; a short one a
chunk and a block, and two blocks. Each request is of a tenant of its own.
"""

from __future__ import annotations

from tests.explorer.events import FAULTS
from tests.explorer.requests import Scenario, Spec

LONG, SHORT = Spec(3, 2), Spec(2, 2)
LONG_ENDING_AT_ONCE, ONE_TOKEN = Spec(3, 2, ends_at_first=True), Spec(2, 1)
TOO_LONG_FOR_PREFILL, TOO_LONG_FOR_BOTH = Spec(5, 1), Spec(6, 2)


def _world(name: str, specs: tuple[Spec, ...], max_faults: int, prefill_blocks: int = 3) -> Scenario:
    return Scenario(name, specs, max_faults, FAULTS, prefill_blocks)


QUICK = (
    _world("two long ones, no fault", (LONG, LONG), 0),
    _world("a rejected one and a long one, no fault", (TOO_LONG_FOR_PREFILL, LONG), 0, prefill_blocks=2),
    _world("too long for both, beside a short one, no fault", (TOO_LONG_FOR_BOTH, SHORT), 0),
    _world("a long one that ends at its first token, any fault", (LONG_ENDING_AT_ONCE,), 1),
    _world("one token asked for, any two faults", (ONE_TOKEN,), 2),
    _world("a long one, any two faults", (LONG,), 2),
    _world("two short ones, any fault", (SHORT, SHORT), 1),
)

FULL = (
    *QUICK,
    _world("a long one and a short one, any fault", (LONG, SHORT), 1),
    _world("two long ones, one of which ends at its first token, any fault", (LONG, LONG_ENDING_AT_ONCE), 1),
    _world("a rejected one and a long one, any fault", (TOO_LONG_FOR_PREFILL, LONG), 1, prefill_blocks=2),
    _world("a long one that ends at its first token, any three faults", (LONG_ENDING_AT_ONCE,), 3),
)

#: In the order of their size; a removed guard shows in the first that can show it.
FOR_MUTANTS = (
    _world("a long one and a short one, no fault", (LONG, SHORT), 0),
    _world("a rejected one and a long one, no fault", (TOO_LONG_FOR_PREFILL, LONG), 0, prefill_blocks=2),
    _world("too long for both, beside a short one, no fault", (TOO_LONG_FOR_BOTH, SHORT), 0),
    _world("a long one, any fault", (LONG,), 1),
    _world("two short ones, any fault", (SHORT, SHORT), 1),
    _world("a long one and a short one, any fault", (LONG, SHORT), 1),
)
