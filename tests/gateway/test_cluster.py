"""A server is in or out by its answers, and a failed request is known at once."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gateway.cluster import DECODE, PREFILL, Cluster, ServerView
from gateway.limits import Limits
from tests.gateway.serving import decode_facts, prefill_facts


def view() -> ServerView:
    return ServerView(DECODE, "decode:1", Limits())


def test_the_first_answer_brings_a_server_in() -> None:
    server = view()
    seen = [server.is_in]
    server.missed()
    server.missed()
    seen.append(server.is_in)
    server.answered(decode_facts())
    seen.append(server.is_in)
    assert seen == [False, False, True]
    assert server.can_serve


def test_two_lost_polls_are_forgiven_and_three_are_not() -> None:
    server = view()
    server.answered(decode_facts())
    server.missed()
    server.missed()
    assert server.is_in
    server.answered(decode_facts())
    server.missed()
    server.missed()
    assert server.is_in
    server.missed()
    assert not server.is_in


def test_a_server_that_was_out_needs_two_good_polls_in_a_row() -> None:
    server = view()
    server.answered(decode_facts())
    for _ in range(3):
        server.missed()
    seen = []
    for answers in (True, False, True, True):
        if answers:
            server.answered(decode_facts())
        else:
            server.missed()
        seen.append(server.is_in)
    assert seen == [False, False, False, True]


def test_a_failed_request_takes_a_server_out_until_its_next_answer() -> None:
    server = view()
    server.answered(decode_facts())
    server.failed()
    assert not server.can_serve
    server.answered(decode_facts())
    assert server.can_serve


def test_a_decode_server_without_a_pair_is_in_but_cannot_serve() -> None:
    server = view()
    server.answered(decode_facts(max_model_len=0))
    assert server.is_in
    assert not server.can_serve
    prefill = ServerView(PREFILL, "prefill:1", Limits())
    prefill.answered(prefill_facts())
    assert prefill.can_serve


def test_what_fits_is_the_most_that_one_server_can_hold_and_is_remembered() -> None:
    cluster = Cluster(["decode:1", "decode:2"], [], Limits())
    assert cluster.max_model_len() == 0
    small, large = cluster.decode
    small.answered(decode_facts("decode:1", max_model_len=100))
    assert cluster.max_model_len() == 100
    large.answered(decode_facts("decode:2", max_model_len=700))
    assert cluster.max_model_len() == 700
    large.failed()
    assert cluster.max_model_len() == 100
    small.failed()
    assert cluster.max_model_len() == 100
    assert not cluster.can_serve()


@given(st.lists(st.sampled_from(["answered", "missed", "failed"]), max_size=30))
def test_whatever_happened_two_answers_in_a_row_bring_a_server_in(steps: list[str]) -> None:
    server = view()
    for step in steps:
        server.answered(decode_facts()) if step == "answered" else getattr(server, step)()
    for _ in range(2):
        server.answered(decode_facts())
    assert server.is_in
