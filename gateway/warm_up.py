"""Before the gateway says that it is ready, a prompt goes the whole way through every decode server's pair.

Two tokens are asked for and none may end the text, so that the prompt's KV really crosses the border.

Never: calls a server warm that has not answered with text, or one that was restarted since.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Mapping
from contextlib import aclosing

from gateway.cluster import Cluster, ServerFacts, ServerView
from gateway.decode_client import DecodeClient
from gateway.limits import Limits
from gateway.polling import Poller
from kvlease.handoff.messages import Aborted, Finished, GenerationRequest, Rejected, RequestId, TenantId
from kvlease.sampling.params import SamplingParams

logger = logging.getLogger(__name__)

TENANT = TenantId("kvlease-warm-up")
_PROMPT = (0, 1, 2)  # any tokens do: the way is what counts
_MAX_TOKENS = 2  # one token would need no transfer


class WarmUp:
    """Which decode servers, in which incarnation, have been seen to work."""

    def __init__(self, cluster: Cluster, clients: Mapping[str, DecodeClient], limits: Limits) -> None:
        """Nothing is warm yet. `clients` by address."""
        self._cluster, self._clients, self._limits = cluster, clients, limits
        self._seen: dict[str, str] = {}

    @property
    def is_done(self) -> bool:
        """Whether any server that is known now is warm."""
        return any(self.is_warm(server) for server in self._cluster.decode)

    def is_warm(self, server: ServerView) -> bool:
        """Whether a prompt went through this very process."""
        return server.facts is not None and self._seen.get(server.address) == server.facts.incarnation

    def can_serve(self) -> bool:
        """Whether a server that is warm could take a request now."""
        return any(server.can_serve and self.is_warm(server) for server in self._cluster.decode)

    async def run(self, poller: Poller) -> None:
        """Warm whatever is new, until cancelled."""
        async with asyncio.TaskGroup() as group:
            for server in self._cluster.decode:
                group.create_task(self._keep_warm(server, poller))

    async def _keep_warm(self, server: ServerView, poller: Poller) -> None:
        pause_s = self._limits.warm_up_pause_s
        while True:
            facts = server.facts
            if facts is None or not server.can_serve or self.is_warm(server):
                await poller.next_answer()
                continue
            fault = await self._ask(server.address, facts)
            if fault is None:
                self._seen[server.address] = facts.incarnation
                pause_s = self._limits.warm_up_pause_s
                logger.info("warm_up.done", extra={"decode": server.address})
            else:
                logger.warning("warm_up.failed", extra={"decode": server.address, "why": fault})
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, self._limits.warm_up_pause_max_s)

    async def _ask(self, address: str, facts: ServerFacts) -> str | None:
        """None: the prompt went through; otherwise why not."""
        request = GenerationRequest(
            request_id=RequestId(secrets.token_hex(16)),
            tenant=TENANT,
            prompt_token_ids=_PROMPT,
            max_tokens=_MAX_TOKENS,
            sampling=SamplingParams(),
            end_token_ids=frozenset(),
            remaining_s=self._limits.warm_up_timeout_s,
            prefill_candidates=tuple(sorted(facts.ready_peers())),
        )
        try:
            async with asyncio.timeout(self._limits.warm_up_timeout_s):
                return await self._outcome(address, request)
        except TimeoutError:
            return f"nothing within {self._limits.warm_up_timeout_s:g} s"

    async def _outcome(self, address: str, request: GenerationRequest) -> str | None:
        async with aclosing(self._clients[address].generate(request)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    return None
                if isinstance(event, Rejected | Aborted):
                    return f"{event.code}: {event.message}"
        return "the stream ended without a verdict"
