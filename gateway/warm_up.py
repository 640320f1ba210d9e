"""Before the gateway says that it is ready, a prompt goes the whole way through every decode server's pair.

Never: calls a server warm that has not answered with text.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping

from gateway.cluster import Cluster, ServerView
from gateway.decode_client import DecodeClient
from gateway.limits import Limits
from kvlease.handoff.messages import (
    DEFAULT_TENANT,
    Finished,
    GenerationRequest,
    RequestId,
    SamplingParams,
)

logger = logging.getLogger(__name__)

_PROMPT = (0, 1, 2)  # any tokens do: the way is what counts


class WarmUp:
    """`is_done` once the first decode server has answered; the others go on behind it."""

    def __init__(self, cluster: Cluster, clients: Mapping[str, DecodeClient], limits: Limits) -> None:
        """Nothing is warm yet."""
        self._cluster, self._clients, self._limits = cluster, clients, limits
        self.is_done = False

    async def run(self) -> None:
        """Until every decode server has answered once."""
        async with asyncio.TaskGroup() as group:
            for server in self._cluster.decode:
                group.create_task(self._warm(server))

    async def _warm(self, server: ServerView) -> None:
        pause = self._limits.warm_up_pause_s
        while not (server.can_serve and await self._ask(server)):
            await asyncio.sleep(pause)
            pause = min(pause * 2, self._limits.warm_up_pause_max_s) if server.can_serve else pause
        self.is_done = True
        logger.info("warm_up.done", extra={"decode": server.address})

    async def _ask(self, server: ServerView) -> bool:
        peers = server.facts.ready_peers() if server.facts is not None else frozenset[str]()
        request = GenerationRequest(
            RequestId(f"warm-up-{secrets.token_hex(4)}"),
            DEFAULT_TENANT,
            _PROMPT,
            2,  # one token would need no transfer
            SamplingParams(),
            frozenset(),
            self._limits.warm_up_timeout_s,
            tuple(peers),
        )
        last = None
        async for event in self._clients[server.address].generate(request):
            last = event
        if not isinstance(last, Finished):
            logger.warning("warm_up.failed", extra={"decode": server.address, "end": repr(last)})
        return isinstance(last, Finished)
