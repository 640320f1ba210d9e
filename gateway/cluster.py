"""What the gateway knows of the servers behind it: their own words, and whether they answer.

Never: does I/O or reads a clock; pollers feed it and the router reads it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gateway.limits import Limits

PAIR_READY = "ready"
DECODE = "decode"
PREFILL = "prefill"


@dataclass(frozen=True, slots=True)
class PairFacts:
    """One pair as one of its ends sees it."""

    peer_address: str
    transport: str
    epoch: int
    state: str  # connecting | ready | stalled | refused
    detail: str = ""
    num_blocks: int = 0
    num_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What one server says of itself. `max_model_len` in tokens, 0 while no pair can serve; `incarnation` in hex."""

    role: str
    address: str
    incarnation: str
    model: str
    dtype: str
    block_size: int
    blocks_free: int
    blocks_reserved: int
    blocks_filling: int
    blocks_readable: int
    blocks_total: int
    num_queued: int
    num_running: int
    max_model_len: int
    pairs: tuple[PairFacts, ...] = ()
    counters: Mapping[str, int] = field(default_factory=dict)
    transport: str = ""  # which carries the blocks, and how it was chosen

    @property
    def pool_tokens(self) -> int:
        """How many tokens its whole pool holds."""
        return self.blocks_total * self.block_size

    @property
    def load(self) -> int:
        """Requests it has taken and not ended."""
        return self.num_queued + self.num_running

    def ready_peers(self) -> frozenset[str]:
        """Addresses of the peers it can work with right now."""
        return frozenset(pair.peer_address for pair in self.pairs if pair.state == PAIR_READY)


class ServerView:
    """One server: its latest facts, and whether it is in.

    In after its first good poll; out after three lost ones in a row, and then back after two good ones. A failed request makes
    it suspect: out until the next good poll.
    """

    def __init__(self, role: str, address: str, limits: Limits) -> None:
        """Out, and unknown, until a poll says otherwise."""
        self.role = role
        self.address = address
        self.facts: ServerFacts | None = None
        self._limits = limits
        self._hits_needed = 1
        self._misses = 0
        self._is_suspect = False

    @property
    def is_in(self) -> bool:
        """Whether it may get requests, as far as answering goes."""
        return self._hits_needed == 0 and not self._is_suspect

    @property
    def can_serve(self) -> bool:
        """In, and by its own word able to serve: a decode server needs a ready pair for that."""
        return self.is_in and self.facts is not None and (self.role == PREFILL or self.facts.max_model_len > 0)

    @property
    def max_model_len(self) -> int:
        """The longest context it can serve now, in tokens; 0: none."""
        return self.facts.max_model_len if self.facts is not None and self.can_serve else 0

    def answered(self, facts: ServerFacts) -> None:
        """A poll was answered."""
        self.facts = facts
        self._misses = 0
        self._is_suspect = False
        self._hits_needed = max(0, self._hits_needed - 1)

    def missed(self) -> None:
        """A poll was lost, or too late."""
        self._misses += 1
        if self._misses >= self._limits.misses_until_out or self._hits_needed:
            self._hits_needed = self._limits.hits_until_back if self.facts is not None else 1

    def failed(self) -> None:
        """A request lost its connection to this server, or through it."""
        self._is_suspect = True


class Cluster:
    """All servers, by role."""

    def __init__(self, decode: Sequence[str], prefill: Sequence[str], limits: Limits) -> None:
        """The addresses are fixed for the life of the gateway."""
        self.decode = tuple(ServerView(DECODE, address, limits) for address in decode)
        self.prefill = tuple(ServerView(PREFILL, address, limits) for address in prefill)
        self._last_max_model_len = 0

    @property
    def servers(self) -> tuple[ServerView, ...]:
        """Every server, decode first."""
        return self.decode + self.prefill

    def max_model_len(self) -> int:
        """The longest context that some decode server can serve now, or, while none can, could when last seen; 0: unknown."""
        now = max((server.max_model_len for server in self.decode), default=0)
        if now:
            self._last_max_model_len = now
        return self._last_max_model_len

    def can_serve(self) -> bool:
        """Whether any decode server could take a request now."""
        return any(server.can_serve for server in self.decode)
