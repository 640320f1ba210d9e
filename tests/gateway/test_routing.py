"""Requests go where least is in flight, and prefill servers are named best first."""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

from gateway.cluster import Cluster, PairFacts
from gateway.limits import Limits
from gateway.routing import Router
from tests.gateway.serving import decode_facts, prefill_facts


def pairs_with(*addresses: str) -> tuple[PairFacts, ...]:
    return tuple(PairFacts(address, "tcp", 1, "ready") for address in addresses)


def cluster(num_decode: int = 2, num_prefill: int = 2) -> Cluster:
    decode = [f"decode:{n}" for n in range(num_decode)]
    prefill = [f"prefill:{n}" for n in range(num_prefill)]
    made = Cluster(decode, prefill, Limits())
    for server in made.decode:
        server.answered(decode_facts(server.address, pairs=pairs_with(*prefill)))
    for server in made.prefill:
        server.answered(prefill_facts(server.address))
    return made


def test_the_least_busy_decode_server_is_chosen() -> None:
    router = Router(cluster(3))
    with ExitStack() as stack:
        for _ in range(9):
            route = router.route(10, 20)
            assert route is not None
            stack.enter_context(router.occupy(route.decode))
        assert [router.num_in_flight(f"decode:{n}") for n in range(3)] == [3, 3, 3]
    assert [router.num_in_flight(f"decode:{n}") for n in range(3)] == [0, 0, 0]


def test_idle_servers_take_turns() -> None:
    router = Router(cluster(2))
    routes = [router.route(10, 20) for _ in range(10)]
    assert Counter(route.decode for route in routes if route) == {"decode:0": 5, "decode:1": 5}


def test_no_server_is_an_answer() -> None:
    servers = cluster(1)
    router = Router(servers)
    assert router.route(10, 20, tried=["decode:0"]) is None
    servers.decode[0].failed()
    assert router.route(10, 20) is None
    assert Router(Cluster([], [], Limits())).route(10, 20) is None


def test_a_server_that_cannot_hold_the_request_is_not_asked() -> None:
    servers = cluster(2)
    servers.decode[0].answered(decode_facts("decode:0", max_model_len=100))
    router = Router(servers)
    assert {route.decode for route in (router.route(90, 101) for _ in range(6)) if route} == {"decode:1"}
    assert router.route(1000, 2000) is None


def test_prefill_servers_are_named_by_load() -> None:
    servers = cluster(1, 3)
    for number, queued in enumerate((5, 0, 9)):
        servers.prefill[number].answered(prefill_facts(f"prefill:{number}", num_queued=queued))
    route = Router(servers).route(10, 20)
    assert route is not None
    assert route.prefill_candidates == ("prefill:1", "prefill:0", "prefill:2")


def test_what_was_sent_since_the_last_poll_counts_as_load() -> None:
    servers = cluster(1, 2)
    router = Router(servers)
    first = Counter(route.prefill_candidates[0] for route in (router.route(10, 20) for _ in range(10)) if route)
    assert first == {"prefill:0": 5, "prefill:1": 5}
    servers.prefill[0].answered(prefill_facts("prefill:0", num_running=3))
    servers.prefill[1].answered(prefill_facts("prefill:1"))
    after = [route.prefill_candidates[0] for route in (router.route(10, 20) for _ in range(7)) if route]
    assert after[:3] == ["prefill:1"] * 3
    assert Counter(after) == {"prefill:1": 5, "prefill:0": 2}


def test_pairs_come_first_and_silent_servers_last() -> None:
    servers = cluster(1, 3)
    servers.decode[0].answered(decode_facts("decode:0", pairs=pairs_with("prefill:1", "prefill:2")))
    servers.prefill[1].failed()
    route = Router(servers).route(10, 20)
    assert route is not None
    assert route.prefill_candidates == ("prefill:2", "prefill:1", "prefill:0")


def test_a_pool_too_small_for_the_prompt_is_left_out_unless_all_are() -> None:
    servers = cluster(1, 2)
    servers.prefill[0].answered(prefill_facts("prefill:0", blocks_total=4))
    router = Router(servers)
    fits, none_fits = router.route(65, 80), router.route(1000, 1020)
    assert fits is not None
    assert fits.prefill_candidates == ("prefill:1",)
    servers.prefill[1].answered(prefill_facts("prefill:1", blocks_total=4))
    none_fits = router.route(65, 80)
    assert none_fits is not None
    assert set(none_fits.prefill_candidates) == {"prefill:0", "prefill:1"}
