"""Whole attempts: what both roles do, joined by an ordered wire."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.handoff.decode_attempt import (
    BlockRefused,
    BlockVerified,
    Committed,
    Conclude,
    DecodeAttempt,
    DecodeHappening,
    Ended,
    FirstToken,
    RoomReserved,
    SendUp,
    decode_step,
)
from kvlease.handoff.lease_book import Lease
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Admitted,
    Commit,
    Complete,
    FinishReason,
    Grant,
    Ready,
    Receipt,
    RejectReason,
)
from kvlease.handoff.prefill_attempt import (
    ChunkComputed,
    EndedHere,
    Free,
    Judged,
    Over,
    PrefillAttempt,
    PrefillHappening,
    SendDown,
    Started,
    prefill_step,
)
from kvlease.handoff.tables import DecodeState, PrefillState
from kvlease.handoff.verdicts import aborted, rejected
from kvlease.sampling.tokens import DrawnToken
from tests.handoff.joined import BLOCK_SIZE, END_TOKEN, EPOCH, GRANT, Joined, proposal

CANCEL = aborted(AbortReason.CANCELLED, "the client left")
FULL = rejected(RejectReason.QUEUE_FULL, "8 requests wait already")


def test_a_prompt_of_one_chunk_is_computed_before_it_asks_for_its_grant() -> None:
    both = Joined(num_tokens=10)
    both.happen_at_prefill(Judged(Admitted(0)))
    both.happen_at_prefill(Started(in_one_chunk=True))
    assert both.said == [Admitted(0)]
    both.happen_at_prefill(ChunkComputed(10, 42))
    both.settle()
    assert both.said == [Admitted(0), Ready(), Commit(3, 10, 42)]
    assert both.outcomes == [Committed(42)]
    assert (both.prefill.state, both.decode.state) == (PrefillState.RECEIPTED, DecodeState.COMMITTED)
    assert (both.num_frees, both.num_overs) == (1, 1)


def test_a_prompt_of_several_chunks_sends_blocks_before_it_is_whole() -> None:
    both = Joined(num_tokens=10)
    both.happen_at_prefill(Judged(Admitted(0)))
    both.happen_at_prefill(Started(in_one_chunk=False))
    assert both.said == [Admitted(0), Ready()]
    both.settle()
    both.happen_at_prefill(ChunkComputed(6, None))
    both.settle()
    assert both.prefill.num_sent == 1, "the second block's tokens are not all computed"
    assert not both.outcomes
    both.happen_at_prefill(ChunkComputed(10, 42))
    both.settle()
    assert both.outcomes == [Committed(42)]
    assert both.prefill.state is PrefillState.RECEIPTED


def test_chunks_may_be_computed_before_the_grant_comes() -> None:
    both = Joined(num_tokens=8)
    for happening in (Judged(Admitted(0)), Started(in_one_chunk=False), ChunkComputed(4, None), ChunkComputed(8, 42)):
        both.happen_at_prefill(happening)
    both.settle()
    assert both.said.count(Ready()) == 1
    assert both.outcomes == [Committed(42)]


def test_blocks_that_land_after_the_manifest_still_count() -> None:
    both = Joined(num_tokens=8)
    for happening in (Judged(Admitted(0)), Started(in_one_chunk=True), ChunkComputed(8, 42)):
        both.happen_at_prefill(happening)
    both.deliver_down()
    both.deliver_down()
    both.happen_at_decode(RoomReserved(GRANT, 1))
    both.up.clear()
    both.happen_at_prefill(GRANT)
    both.send_block()
    both.send_block()
    both.deliver_down()
    assert both.decode.state is DecodeState.CLOSING
    both.land_block()
    assert not both.outcomes
    both.land_block()
    assert both.outcomes == [Committed(42)]


@pytest.mark.parametrize("in_one_chunk", [True, False])
def test_a_first_token_that_ends_the_text_transfers_nothing(in_one_chunk: bool) -> None:
    both = Joined(num_tokens=10)
    for happening in (Judged(Admitted(0)), Started(in_one_chunk), ChunkComputed(10, END_TOKEN)):
        both.happen_at_prefill(happening)
    both.settle()
    assert both.outcomes == [Complete(END_TOKEN, FinishReason.STOP)]
    assert (both.prefill.num_sent, both.num_frees, both.num_overs) == (0, 1, 1)


@pytest.mark.parametrize("in_one_chunk", [True, False])
def test_one_token_asked_for_never_asks_for_a_grant(in_one_chunk: bool) -> None:
    both = Joined(num_tokens=10, max_tokens=1)
    for happening in (Judged(Admitted(0)), Started(in_one_chunk), ChunkComputed(10, 42)):
        both.happen_at_prefill(happening)
    both.settle()
    assert Ready() not in both.said
    assert both.outcomes == [Complete(42, FinishReason.LENGTH)]


def test_a_verdict_reaches_decode_as_it_was_made() -> None:
    both = Joined()
    both.happen_at_prefill(Judged(FULL))
    both.settle()
    assert both.outcomes == [FULL]
    assert (both.prefill.state, both.decode.state) == (PrefillState.REJECTED, DecodeState.REJECTED)
    assert (both.num_frees, len(both.book)) == (0, 0)


HAPPENINGS = (Judged(Admitted(0)), Started(in_one_chunk=False), ChunkComputed(6, None), ChunkComputed(10, 42))


@pytest.mark.parametrize("num_done", range(len(HAPPENINGS) + 1))
@pytest.mark.parametrize("settles", [True, False])
def test_an_end_at_any_state_ends_both_sides_once(num_done: int, settles: bool) -> None:
    both = Joined()
    for happening in HAPPENINGS[:num_done]:
        both.happen_at_prefill(happening)
        if settles and num_done < len(HAPPENINGS):
            both.settle()
    both.happen_at_decode(Ended(CANCEL))
    both.happen_at_prefill(EndedHere(CANCEL))
    both.settle()
    assert both.outcomes == [CANCEL]
    assert (both.prefill.state, both.decode.state) == (PrefillState.ABORTED, DecodeState.ABORTED)
    assert (both.num_frees, both.num_overs) == (1, 1)


def test_a_refused_block_ends_the_attempt_and_names_its_check() -> None:
    attempt = granted()
    attempt, actions = decode_step(attempt, BlockRefused("digest", "the copy differs"))
    ended = aborted(AbortReason.SEAL_REFUSED, "a block failed its digest check: the copy differs")
    assert (attempt.state, actions) == (DecodeState.ABORTED, (Conclude(ended),))


@pytest.mark.parametrize(
    ("commit", "words"),
    [
        (Commit(2, 10, 42), "the manifest has 2 blocks, the lease is for 3"),
        (Commit(3, 11, 42), "the manifest has 11 tokens, the prompt 10"),
    ],
)
def test_a_manifest_that_disagrees_never_commits(commit: Commit, words: str) -> None:
    attempt, actions = decode_step(granted(), commit)
    assert actions == (Conclude(aborted(AbortReason.MANIFEST_MISMATCH, words)),)
    assert attempt.is_over


@pytest.mark.parametrize("tokens", [(END_TOKEN, END_TOKEN), (END_TOKEN, 42), (42, END_TOKEN), (42, 43)])
def test_choices_are_complete_at_once_only_if_all_of_them_are(tokens: tuple[int, int]) -> None:
    further = (DrawnToken(tokens[1]),)
    attempt = PrefillAttempt.of(proposal(10), BLOCK_SIZE)
    said = []
    for happening in (Judged(Admitted(0)), Started(in_one_chunk=True), ChunkComputed(10, tokens[0], None, further)):
        attempt, actions = prefill_step(attempt, happening)
        said += [action.message for action in actions if isinstance(action, SendDown)]
    if tokens == (END_TOKEN, END_TOKEN):
        assert said[-1] == Complete(END_TOKEN, FinishReason.STOP, None, further)
    else:
        assert said[-1] == Ready()


@pytest.mark.parametrize("num_first", [1, 2, 4])
def test_decode_takes_as_many_first_tokens_as_it_asked_for(num_first: int) -> None:
    further = tuple(DrawnToken(50 + n) for n in range(num_first - 1))
    attempt = replace(granted(), num_choices=2)
    _, actions = decode_step(attempt, Commit(3, 10, 42, None, further))
    waiting, _ = decode_step(DecodeAttempt(10, 3, num_choices=2), Admitted(0))
    _, ends = decode_step(waiting, Complete(42, FinishReason.LENGTH, None, further))
    if num_first == 2:
        assert actions == ()
        assert ends == (Conclude(Complete(42, FinishReason.LENGTH, None, further)),)
    else:
        for action in (*actions, *ends):
            assert isinstance(action, Conclude) and isinstance(action.outcome, Aborted)
            assert action.outcome.reason is AbortReason.MANIFEST_MISMATCH
            assert f"{num_first} first tokens" in action.outcome.message


def test_a_grant_of_another_epoch_is_refused() -> None:
    attempt = PrefillAttempt.of(proposal(), BLOCK_SIZE)
    for happening in HAPPENINGS[:2]:
        attempt, _ = prefill_step(attempt, happening)
    other = Grant(GRANT.lease_id, GRANT.nonce, type(EPOCH)(EPOCH + 1))
    attempt, actions = prefill_step(attempt, other)
    assert attempt.state is PrefillState.ABORTED
    assert isinstance(actions[0], SendDown)
    assert isinstance(actions[0].message, Aborted)
    assert actions[0].message.reason is AbortReason.PROTOCOL_ERROR


def granted() -> DecodeAttempt:
    attempt = DecodeAttempt(10, 3)
    for happening in (Admitted(0), Ready(), RoomReserved(GRANT, 1)):
        attempt, _ = decode_step(attempt, happening)
    assert attempt.state is DecodeState.GRANTED
    return attempt


@pytest.mark.parametrize("message", [Ready(), Commit(3, 10, 42), Complete(42, FinishReason.STOP)])
def test_decode_ends_at_a_message_out_of_order(message: Ready | Commit | Complete) -> None:
    attempt, actions = decode_step(DecodeAttempt(10, 3), message)
    assert attempt.state is DecodeState.ABORTED
    assert isinstance(actions[0], Conclude)
    assert isinstance(actions[0].outcome, Aborted)
    assert actions[0].outcome.reason is AbortReason.PROTOCOL_ERROR


@pytest.mark.parametrize("message", [GRANT, Receipt(3)])
def test_prefill_ends_at_a_message_out_of_order(message: Grant | Receipt) -> None:
    attempt, actions = prefill_step(PrefillAttempt.of(proposal(), BLOCK_SIZE), message)
    assert attempt.state is PrefillState.ABORTED
    assert isinstance(actions[0], SendDown)
    assert isinstance(actions[0].message, Aborted)
    assert actions[0].message.reason is AbortReason.PROTOCOL_ERROR
    assert actions[1:] == (Free(), Over())


LEASE = Lease(GRANT, 1, 10, 3)
decode_happenings: st.SearchStrategy[DecodeHappening] = st.one_of(
    st.sampled_from([Admitted(0), FULL, Ready(), RoomReserved(GRANT, 1), Commit(3, 10, 42), Commit(2, 10, 42)]),
    st.sampled_from([BlockVerified(Lease(GRANT, 1, 10, 3, verified)) for verified in (1, 3, 7)]),
    st.sampled_from([BlockRefused("tag", "forged"), Complete(42, FinishReason.STOP), CANCEL, Ended(CANCEL)]),
)


@given(st.lists(decode_happenings, max_size=12))
def test_decode_concludes_at_most_once_and_then_stands_still(happenings: list[DecodeHappening]) -> None:
    attempt, num_concluded = DecodeAttempt(10, 3), 0
    for happening in happenings:
        was_over, before = attempt.is_over, attempt
        attempt, actions = decode_step(attempt, happening)
        num_concluded += sum(isinstance(action, Conclude) for action in actions)
        if was_over:
            assert (attempt, actions) == (before, ())
        if Conclude(Committed(42)) in actions:
            assert SendUp(Receipt(3)) in actions
            assert attempt.lease is not None
            assert attempt.lease.is_whole
    assert num_concluded == attempt.is_over


peer_happenings: st.SearchStrategy[PrefillHappening] = st.sampled_from(
    [Judged(Admitted(0)), Judged(FULL), Started(True), Started(False), GRANT, Receipt(3), EndedHere(CANCEL)]
)


@given(st.lists(st.one_of(peer_happenings, st.just("chunk"), st.just("block")), max_size=16))
def test_prefill_ends_at_most_once_and_then_stands_still(happenings: list[PrefillHappening | str]) -> None:
    both = Joined()
    for happening in happenings:
        was_over, before = both.prefill.is_over, both.prefill
        if not isinstance(happening, str):
            both.happen_at_prefill(happening)
        elif happening == "block" and both.prefill.may_send:
            both.send_block()
        elif happening == "chunk" and both.prefill.num_computed < 10:
            done = min(both.prefill.num_computed + 5, 10)
            both.happen_at_prefill(ChunkComputed(done, 42 if done == 10 else None))
        assert both.num_overs == both.prefill.is_over
        assert both.num_frees <= 1
        assert not was_over or both.prefill is before


def test_a_manifest_alone_commits_nothing() -> None:
    attempt = DecodeAttempt(10, 3)
    for happening in (Admitted(0), Ready(), RoomReserved(GRANT, 1), Commit(3, 10, 42)):
        attempt, actions = decode_step(attempt, happening)
        assert not any(isinstance(action, Conclude) for action in actions)
    assert attempt.state is DecodeState.CLOSING


def test_a_cancel_behind_the_manifest_frees_nothing_again() -> None:
    both = Joined(num_tokens=8)
    for happening in (Judged(Admitted(0)), Started(in_one_chunk=True), ChunkComputed(8, 42), GRANT):
        both.happen_at_prefill(happening)
    both.send_block()
    both.send_block()
    assert isinstance(both.said[-1], Commit)
    both.happen_at_prefill(EndedHere(CANCEL))
    assert both.prefill.state is PrefillState.ABORTED
    assert both.num_frees == 1


@pytest.mark.parametrize(
    ("max_tokens", "tokens", "reason", "is_right"),
    [
        (5, (END_TOKEN, END_TOKEN), FinishReason.STOP, True),
        (5, (END_TOKEN, 42), FinishReason.STOP, False),
        (1, (END_TOKEN, 42), FinishReason.STOP, True),
        (1, (42, END_TOKEN), FinishReason.LENGTH, True),
        (1, (42, END_TOKEN), FinishReason.STOP, False),
        (1, (42, 100), FinishReason.LENGTH, False),
    ],
)
def test_decode_finds_for_itself_whether_all_choices_are_complete(
    max_tokens: int, tokens: tuple[int, int], reason: FinishReason, is_right: bool
) -> None:
    first = FirstToken(100, max_tokens, frozenset({END_TOKEN}))
    waiting, _ = decode_step(DecodeAttempt(10, 3, num_choices=2, first_token=first), Admitted(0))
    complete = Complete(tokens[0], reason, None, (DrawnToken(tokens[1]),))
    _, (conclusion,) = decode_step(waiting, complete)
    assert isinstance(conclusion, Conclude)
    assert isinstance(conclusion.outcome, Complete if is_right else Aborted)
