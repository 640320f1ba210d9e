"""Tokenizing has few threads and a short queue, and every place comes back."""

from __future__ import annotations

import asyncio
import threading

import pytest

from gateway.errors import RequestRefused
from gateway.limits import Limits
from gateway.preparation import Preparation
from tests.gateway.serving import on_loop
from tests.waiting import until

TIGHT = Limits(preparation_threads=1, max_preparing=1)


@on_loop
async def test_work_runs_off_the_loop() -> None:
    preparation = Preparation(TIGHT)
    assert await preparation.run(threading.get_ident) != threading.get_ident()
    preparation.close()


@on_loop
async def test_what_finds_no_place_is_refused_at_once_and_places_come_back() -> None:
    preparation = Preparation(TIGHT)
    go_on, started = threading.Event(), threading.Event()

    def slow() -> bool:
        started.set()
        return go_on.wait(10)

    running, queued = [asyncio.create_task(preparation.run(slow)) for _ in range(2)]
    await until(started.is_set)
    with pytest.raises(RequestRefused) as caught:
        await preparation.run(lambda: None)
    assert (caught.value.error.http_status, caught.value.error.code) == (429, "gateway_busy")
    go_on.set()
    assert [await running, await queued] == [True, True]
    for _ in range(5):
        await preparation.run(lambda: None)
    preparation.close()


@on_loop
async def test_work_cancelled_in_the_queue_never_starts_and_gives_its_place_back() -> None:
    preparation = Preparation(TIGHT)
    go_on, started = threading.Event(), threading.Event()
    done: list[str] = []

    def slow() -> None:
        started.set()
        go_on.wait(10)

    running = asyncio.create_task(preparation.run(slow))
    await until(started.is_set)
    for _ in range(3):
        queued = asyncio.create_task(preparation.run(lambda: done.append("ran")))
        await asyncio.sleep(0)
        queued.cancel()
        with pytest.raises(asyncio.CancelledError):
            await queued
    go_on.set()
    await running
    preparation.close()
    assert done == []


@on_loop
async def test_what_work_raises_arrives() -> None:
    preparation = Preparation(TIGHT)

    def fails() -> None:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        await preparation.run(fails)
    preparation.close()
