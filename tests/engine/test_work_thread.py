from __future__ import annotations

import asyncio
import threading

from kvlease.engine.limits import Limits
from kvlease.engine.work_thread import WorkThread

LIMITS = Limits(max_copy_here_bytes=100)


def test_a_short_copy_is_done_in_the_loop_and_a_long_one_is_not() -> None:
    async def test() -> None:
        thread = WorkThread("copies", LIMITS)
        try:
            assert await thread.run_copy(100, threading.get_ident) == threading.get_ident()
            assert await thread.run_copy(101, threading.get_ident) != threading.get_ident()
        finally:
            thread.close()

    asyncio.run(test())


def test_short_copies_leave_the_loop_its_turn() -> None:
    async def test() -> None:
        thread, turns = WorkThread("copies", LIMITS), 0

        async def count() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        counting = asyncio.create_task(count())
        try:
            for _ in range(2):
                await thread.run_copy(50, int)
            assert turns == 0
            for _ in range(20):
                await thread.run_copy(50, int)
            assert turns == 10
        finally:
            counting.cancel()
            thread.close()

    asyncio.run(test())


def test_who_is_cancelled_before_a_short_copy_has_lost_nothing() -> None:
    async def test() -> None:
        thread, done = WorkThread("copies", LIMITS), list[int]()
        copying = asyncio.create_task(_copies(thread, done))
        await asyncio.sleep(0)
        copying.cancel()
        await asyncio.wait([copying])
        assert done == [0], "the second one was never begun"
        thread.close()

    asyncio.run(test())


async def _copies(thread: WorkThread, done: list[int]) -> None:
    for number in range(2):
        await thread.run_copy(60, done.append, number)
