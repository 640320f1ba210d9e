"""The prefill servers of a decode server: a pair and a dock for each.

Never: chooses between two servers for a request beyond the gateway's order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from decode_server.landing import Dock
from decode_server.memory import DecodeMemory
from kvlease.engine.work_thread import WorkThread
from kvlease.peering.agreement import Party
from kvlease.peering.heartbeat import Beat
from kvlease.peering.outgoing import OutgoingPair
from transport.contract import Landing, Transport


@dataclass(frozen=True, slots=True)
class Peer:
    """One prefill server."""

    pair: OutgoingPair
    dock: Dock


class Peers:
    """All prefill servers, by address."""

    def __init__(self, peers: Sequence[Peer]) -> None:
        """Their pairs are kept by somebody else's tasks."""
        self._peers = {peer.pair.peer_address: peer for peer in peers}

    @property
    def pairs(self) -> list[OutgoingPair]:
        """Every pair, ready or not."""
        return [peer.pair for peer in self._peers.values()]

    def candidates(self, addresses: Sequence[str]) -> list[Peer]:
        """Ready peers in the gateway's order; the ones it did not name come last, in ours."""
        named = [self._peers[address] for address in addresses if address in self._peers]
        others = [peer for peer in self._peers.values() if peer not in named]
        return [peer for peer in (*named, *others) if peer.pair.is_ready]

    def capacity(self) -> int:
        """The longest context (tokens) that every ready pair can hold; 0: no pair is ready."""
        return min((pair.peer_capacity for pair in self.pairs if pair.is_ready), default=0)


@dataclass(frozen=True, slots=True)
class PeerMaker:
    """What all peers of one decode server share."""

    party: Party
    secret: str
    transport: Transport
    beat: Callable[[], Beat]
    memory: DecodeMemory
    thread: WorkThread
    counters: Counter[str]

    def make(self, address: str) -> Peer:
        """A peer whose pair is not opened yet."""
        dock = Dock(self.memory, self.thread, self.counters)

        async def land(_pair: OutgoingPair, landing: Landing) -> None:
            await dock.land(landing)

        return Peer(OutgoingPair(address, self.party, self.secret, self.transport, self.beat, land), dock)
