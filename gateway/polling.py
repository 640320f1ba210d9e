"""Asks every server each second how it is, one question at a time.

Never: waits for one server before it asks another.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from gateway.cluster import Cluster, ServerView
from gateway.decode_client import StatusClient
from gateway.limits import Limits


class Poller:
    """Feeds the cluster's view."""

    def __init__(self, cluster: Cluster, clients: Mapping[str, StatusClient], limits: Limits) -> None:
        """`clients` by address."""
        self._cluster, self._clients, self._limits = cluster, clients, limits
        self._soon = {server.address: asyncio.Event() for server in cluster.servers}
        self._answered = asyncio.Event()

    def ask_soon(self, address: str) -> None:
        """Something went wrong with that server: do not wait for the next turn."""
        self._soon[address].set()

    async def next_answer(self) -> None:
        """Wait until the next poll of any server is over, answered or lost."""
        await self._answered.wait()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as group:
            for server in self._cluster.servers:
                group.create_task(self._watch(server))

    async def _watch(self, server: ServerView) -> None:
        soon = self._soon[server.address]
        while True:
            soon.clear()
            await self._ask(server)
            self._answered.set()
            self._answered = asyncio.Event()
            pause = self._limits.poll_s if server.can_serve else self._limits.poll_soon_s
            try:
                async with asyncio.timeout(pause):
                    await soon.wait()
            except TimeoutError:
                pass

    async def _ask(self, server: ServerView) -> None:
        facts = None
        try:
            async with asyncio.timeout(self._limits.poll_timeout_s):
                facts = await self._clients[server.address].status()
        except TimeoutError:
            pass
        if facts is None:
            server.missed()
        else:
            server.answered(facts)
