"""A lease lives once, is whole when every position is verified, and a stranger finds nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.handoff.lease_book import Lease, LeaseBook
from kvlease.handoff.messages import Epoch, Grant, LeaseId, Nonce


def lease(letter: bytes = b"a", num_blocks: int = 3) -> Lease:
    return Lease(Grant(LeaseId(letter * 16), Nonce(b"n" * 16), Epoch(1)), 1, num_blocks * 4, num_blocks)


@given(st.permutations(range(5)))
def test_a_lease_is_whole_with_its_last_position_in_any_order(order: list[int]) -> None:
    book, entry = LeaseBook(), lease(num_blocks=5)
    book.open(entry)
    for num_before, position in enumerate(order):
        assert not entry.is_whole
        entry = book.verify(entry.grant.lease_id, position)
        assert entry.has(position)
        assert entry.num_verified == num_before + 1
    assert entry.is_whole


def test_an_ended_lease_is_a_stranger() -> None:
    book = LeaseBook()
    book.open(lease())
    assert book.find(b"a" * 16) == lease()
    assert book.end(LeaseId(b"a" * 16)) == lease()
    assert book.find(b"a" * 16) is None
    assert len(book) == 0


def test_nothing_is_verified_twice_or_outside_the_lease() -> None:
    book = LeaseBook()
    book.open(lease())
    book.verify(LeaseId(b"a" * 16), 0)
    for position in (0, -1, 3):
        with pytest.raises(AssertionError):
            book.verify(LeaseId(b"a" * 16), position)


def test_a_copy_is_equal_and_its_own() -> None:
    book = LeaseBook()
    book.open(lease(b"b"))
    book.open(lease(b"a"))
    twin = book.copy()
    assert twin == book
    assert twin.key() == book.key() == (lease(b"a"), lease(b"b"))
    twin.verify(LeaseId(b"a" * 16), 1)
    assert twin != book
