"""What the gateway needs from the servers behind it, as contracts.

Never: knows gRPC; the adapters live with the channels.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Protocol

from gateway.cluster import ServerFacts
from kvlease.handoff.messages import GenerationEvent, GenerationRequest


class StatusClient(Protocol):
    """Asks one server how it is."""

    @property
    def address(self) -> str:
        """host:port, the server's name inside the cluster."""
        ...

    async def status(self) -> ServerFacts | None:
        """What the server says of itself; None: it cannot be reached. May be cancelled at any time."""
        ...


class DecodeClient(StatusClient, Protocol):
    """Speaks to one decode server."""

    def generate(self, request: GenerationRequest) -> AsyncGenerator[GenerationEvent, None]:
        """The events of one request, ending with exactly one of Finished, Rejected, Aborted.

        An async generator: closing it (`aclose`, or cancelling whoever waits for the next event) cancels the request on both
        servers. Trouble on the way is reported as `Aborted(PEER_LOST)`; nothing is raised.
        """
        ...
