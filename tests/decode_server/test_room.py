"""Room goes to whoever came first; smaller ones may pass the head of the queue, but only so often."""

from __future__ import annotations

from decode_server.room import RoomQueue


def test_whoever_came_first_is_served_first() -> None:
    queue = RoomQueue(max_bypass=2)
    first, second = queue.ask(3), queue.ask(3)
    assert [queue.serve(3), queue.serve(3), queue.serve(3)] == [first, second, None]


def test_a_large_one_is_passed_only_so_often() -> None:
    queue = RoomQueue(max_bypass=2)
    large = queue.ask(10)
    small = [queue.ask(1) for _ in range(3)]
    assert [queue.serve(5), queue.serve(5), queue.serve(5)] == [small[0], small[1], None]
    assert queue.serve(10) == large
    assert queue.serve(5) == small[2]


def test_one_who_withdrew_holds_nobody_up() -> None:
    queue = RoomQueue(max_bypass=0)
    large, small = queue.ask(10), queue.ask(1)
    assert queue.serve(5) is None
    queue.withdraw(large)
    assert queue.serve(5) == small
    queue.withdraw(small)
    assert len(queue) == 0
