from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from kvlease.cli.limits import Limits
from kvlease.cli.supervision import (
    Action,
    Drain,
    End,
    Event,
    Exited,
    Kill,
    Listening,
    Say,
    Start,
    StopAsked,
    Supervisor,
    Tick,
    Tier,
)

LIMITS = Limits(restart_first_s=1.0, restart_most_s=4.0, restart_forget_s=60.0, max_failed_starts=3)
TIERS = {"p0": Tier.PREFILL, "p1": Tier.PREFILL, "d0": Tier.DECODE, "g": Tier.GATEWAY}


def make(drain_s: float = 10.0) -> Supervisor:
    return Supervisor(list(TIERS.items()), drain_s, LIMITS)


def running() -> Supervisor:
    supervisor = make()
    supervisor.handle(Tick(), 0.0)
    for name in TIERS:
        supervisor.handle(Listening(name, "a:1"), 0.0)
    return supervisor


def silent(actions: tuple[Action, ...]) -> tuple[Action, ...]:
    return tuple(action for action in actions if not isinstance(action, Say))


def test_a_tier_starts_when_all_below_it_have_listened() -> None:
    supervisor = make()
    assert supervisor.handle(Tick(), 0.0) == (Start("p0"), Start("p1"))
    assert supervisor.handle(Listening("p1", "a:1"), 1.0) == ()
    assert supervisor.handle(Listening("p0", "a:2"), 2.0) == (Start("d0"),)
    assert supervisor.handle(Listening("d0", "a:3"), 3.0) == (Start("g"),)


def test_a_death_below_does_not_hold_up_a_tier_that_may_start() -> None:
    supervisor = make()
    supervisor.handle(Tick(), 0.0)
    supervisor.handle(Listening("p0", "a:1"), 0.0)
    supervisor.handle(Exited("p0", -9), 0.5)
    assert Start("d0") in supervisor.handle(Listening("p1", "a:2"), 1.0)


def test_pauses_double_up_to_a_bound_and_begin_anew_after_a_healthy_run() -> None:
    supervisor, now = running(), 0.0
    for pause_s in (1.0, 2.0, 4.0, 4.0):
        assert silent(supervisor.handle(Exited("p0", 1), now)) == ()
        assert supervisor.next_tick_at() == now + pause_s
        assert supervisor.handle(Tick(), now + pause_s / 2) == ()
        now += pause_s
        assert supervisor.handle(Tick(), now) == (Start("p0"),)
    supervisor.handle(Exited("p0", 1), now + LIMITS.restart_forget_s)
    assert supervisor.next_tick_at() == now + LIMITS.restart_forget_s + 1.0


def test_a_server_that_has_listened_once_is_never_given_up() -> None:
    supervisor, now = running(), 0.0
    for _ in range(LIMITS.max_failed_starts + 3):
        supervisor.handle(Exited("d0", 1), now)
        now += LIMITS.restart_most_s
        assert supervisor.handle(Tick(), now) == (Start("d0"),)


def test_a_clean_exit_nobody_asked_for_is_a_death_too() -> None:
    supervisor = running()
    supervisor.handle(Exited("g", 0), 5.0)
    assert supervisor.handle(Tick(), 6.0) == (Start("g"),)


def test_a_refusal_ends_the_whole_with_code_2_and_its_line() -> None:
    supervisor = make()
    supervisor.handle(Tick(), 0.0)
    actions = supervisor.handle(Exited("p0", 2, "no such device"), 1.0)
    assert actions == (Say("p0: no such device"), Drain("p1"))
    assert supervisor.handle(Exited("p1", 0), 2.0) == (End(2),)


def test_stopping_goes_backwards_through_the_tiers() -> None:
    supervisor = running()
    assert silent(supervisor.handle(StopAsked(), 1.0)) == (Drain("g"),)
    assert supervisor.handle(Exited("p0", 0), 1.5) == ()
    assert supervisor.handle(Exited("g", 0), 2.0) == (Drain("d0"),)
    assert supervisor.handle(Exited("d0", 0), 3.0) == (Drain("p1"),)
    assert supervisor.handle(Exited("p1", 0), 4.0) == (End(0),)


def test_what_has_not_drained_in_time_is_killed_once() -> None:
    supervisor = running()
    supervisor.handle(StopAsked(), 1.0)
    assert supervisor.next_tick_at() == 11.0
    assert silent(supervisor.handle(Tick(), 11.0)) == tuple(Kill(name) for name in TIERS)
    assert supervisor.next_tick_at() is None
    assert supervisor.handle(Tick(), 12.0) == ()


def test_asking_twice_kills_at_once() -> None:
    supervisor = running()
    supervisor.handle(StopAsked(), 1.0)
    assert silent(supervisor.handle(StopAsked(), 1.1)) == tuple(Kill(name) for name in TIERS)


def test_asking_while_nothing_runs_ends() -> None:
    supervisor = Supervisor([("p0", Tier.PREFILL)], 10.0, LIMITS)
    supervisor.handle(Tick(), 0.0)
    supervisor.handle(Exited("p0", 1), 0.0)
    assert silent(supervisor.handle(StopAsked(), 0.5)) == (End(0),)


NAMES = st.sampled_from(list(TIERS))
EVENTS: st.SearchStrategy[Event] = st.one_of(
    st.builds(Listening, NAMES, st.just("a:1")),
    st.builds(Exited, NAMES, st.sampled_from([0, 1, -9, -9, -9, 2])),
    st.just(Tick()),
    st.just(Tick()),
    st.just(StopAsked()),
)


@given(st.lists(st.tuples(EVENTS, st.floats(0, 20)), max_size=60))
def test_whatever_happens_nothing_runs_twice_and_the_end_comes_when_nothing_runs(
    script: list[tuple[Event, float]],
) -> None:
    supervisor, alive, now, has_ended, killed = make(), set[str](), 0.0, False, set[str]()
    for event, later_s in [(Tick(), 0.0), *script]:
        if isinstance(event, Listening | Exited) and event.name not in alive:
            continue  # it cannot happen
        now += later_s
        if isinstance(event, Exited):
            alive.remove(event.name)
        was_stopping = supervisor.is_stopping
        for action in supervisor.handle(event, now):
            assert not has_ended
            match action:
                case Start(name):
                    assert name not in alive
                    assert not was_stopping
                    alive.add(name)
                case Drain(name):
                    assert name in alive
                    assert TIERS[name] is max(TIERS[other] for other in alive)
                case Kill(name):
                    assert name in alive
                    assert name not in killed
                    killed.add(name)
                case End():
                    assert not alive
                    has_ended = True
        if has_ended:
            break
        assert alive or supervisor.next_tick_at() is not None, "something must be going to happen"
        assert not (supervisor.is_stopping and not alive), "it has stopped, and nobody was told"
