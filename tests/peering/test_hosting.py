"""A server whose loop has died does not go on listening."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from kvlease.peering.hosting import advertised, ended, until_signal


def test_the_death_of_a_loop_ends_the_server_with_its_error() -> None:
    async def loop() -> None:
        raise AssertionError("the books do not agree")

    async def test() -> None:
        async with asyncio.timeout(5):
            with pytest.raises(AssertionError, match="the books do not agree"):
                await until_signal([asyncio.create_task(loop())])

    asyncio.run(test())


def test_a_loop_that_ends_by_itself_ends_the_server_too() -> None:
    async def test() -> None:
        async with asyncio.timeout(5):
            with pytest.raises(RuntimeError, match="the loop ended by itself"):
                await until_signal([asyncio.create_task(asyncio.sleep(0), name="the loop")])

    asyncio.run(test())


def test_a_signal_ends_the_waiting_and_leaves_the_loops_alone() -> None:
    async def test() -> None:
        work: asyncio.Task[None] = asyncio.create_task(asyncio.Event().wait())  # type: ignore[arg-type]
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        async with asyncio.timeout(5):
            await until_signal([work])
        assert not work.done()
        await ended(work)
        assert work.cancelled()

    asyncio.run(test())


@pytest.mark.parametrize(
    ("host", "known_as"),
    [("", "0.0.0.0:7"), ("node-7", "node-7:7"), ("10.0.0.7", "10.0.0.7:7"), ("fd00::7", "[fd00::7]:7")],
)
def test_peers_know_a_server_by_what_it_advertises(host: str, known_as: str) -> None:
    assert advertised("0.0.0.0:7", host) == known_as
