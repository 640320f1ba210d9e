"""Which decode server gets a request, and which prefill servers it may ask, best first.

Never: waits: no server that can serve is an answer too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from gateway.cluster import Cluster, ServerFacts, ServerView


@dataclass(frozen=True, slots=True)
class Route:
    """Where one attempt goes."""

    decode: str
    prefill_candidates: tuple[str, ...]


class Router:
    """Chooses by what is in flight here and what the servers last said; ties go round."""

    def __init__(self, cluster: Cluster) -> None:
        """Nothing is in flight yet."""
        self._cluster = cluster
        self._in_flight: Counter[str] = Counter()
        self._since_poll: dict[str, tuple[ServerFacts | None, int]] = {}
        self._turn = 0

    def route(self, num_prompt_tokens: int, num_tokens: int, tried: Collection[str] = ()) -> Route | None:
        """A route for a prompt that needs `num_tokens` of context in all, or None while no server can take it."""
        self._turn += 1
        candidates = [
            server
            for server in self._rotated(self._cluster.decode)
            if server.address not in tried and server.max_model_len >= num_tokens
        ]
        if not candidates:
            return None
        chosen = min(candidates, key=lambda server: self._in_flight[server.address])
        prefill = self._order_prefill(chosen, num_prompt_tokens)
        if prefill:
            self._count_assigned(prefill[0])
        return Route(chosen.address, prefill)

    @contextmanager
    def occupy(self, address: str) -> Iterator[None]:
        """Counts one request on a decode server for as long as the block lasts."""
        self._in_flight[address] += 1
        try:
            yield
        finally:
            self._in_flight[address] -= 1

    def num_in_flight(self, address: str) -> int:
        """Requests of this gateway on that decode server."""
        return self._in_flight[address]

    def _rotated(self, servers: tuple[ServerView, ...]) -> tuple[ServerView, ...]:
        start = self._turn % len(servers) if servers else 0
        return servers[start:] + servers[:start]

    def _order_prefill(self, decode: ServerView, num_prompt_tokens: int) -> tuple[str, ...]:
        """All that could ever hold the prompt: paired ones first, then those that answer, then by load.

        What a silent server can hold is unknown, so it stays, last. Were none left, all are named: prefill's own verdict is
        better than a guess.
        """
        paired = decode.facts.ready_peers() if decode.facts is not None else frozenset[str]()

        def rank(server: ServerView) -> tuple[bool, bool, int]:
            return (server.address not in paired, not server.can_serve, self._load(server))

        servers = sorted(self._rotated(self._cluster.prefill), key=rank)
        large_enough = [s for s in servers if s.facts is None or s.facts.pool_tokens >= num_prompt_tokens]
        return tuple(server.address for server in large_enough or servers)

    def _load(self, server: ServerView) -> int:
        """Its own count at the last poll, and what went there since."""
        if server.facts is None:
            return 0
        facts, assigned = self._since_poll.get(server.address, (None, 0))
        return server.facts.load + (assigned if facts is server.facts else 0)

    def _count_assigned(self, address: str) -> None:
        facts = next(server.facts for server in self._cluster.prefill if server.address == address)
        seen, assigned = self._since_poll.get(address, (None, 0))
        self._since_poll[address] = (facts, assigned + 1 if seen is facts else 1)
