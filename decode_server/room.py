"""Who waits for room in the pool, and who is next: first come, first served, with bounded bypass.

A request whose room is not free yet may be passed by later, smaller ones, at most `max_bypass` times; then nobody passes it. Each gets
all of its room or none, so two requests never hold half a pool each.

Never: awaits, or holds a block.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class _Ticket:
    number: int
    num_blocks: int
    num_bypassed: int = 0


class RoomQueue:
    """Tickets in order of arrival."""

    def __init__(self, max_bypass: int) -> None:
        """Nobody waits."""
        self._max_bypass = max_bypass
        self._tickets: list[_Ticket] = []
        self._next_number = 0

    def __len__(self) -> int:
        """How many wait."""
        return len(self._tickets)

    def ask(self, num_blocks: int) -> int:
        """A ticket for so many blocks."""
        self._next_number += 1
        self._tickets.append(_Ticket(self._next_number, num_blocks))
        return self._next_number

    def withdraw(self, number: int) -> None:
        """The ticket's owner has gone. Harmless when it was served."""
        self._tickets = [ticket for ticket in self._tickets if ticket.number != number]

    def serve(self, num_free: int) -> int | None:
        """The next ticket that gets its room out of `num_free` blocks, removed from the queue; None: nobody yet."""
        for index, ticket in enumerate(self._tickets):
            if ticket.num_blocks <= num_free:
                for passed in self._tickets[:index]:
                    passed.num_bypassed += 1
                del self._tickets[index]
                return ticket.number
            if ticket.num_bypassed >= self._max_bypass:
                return None
        return None
