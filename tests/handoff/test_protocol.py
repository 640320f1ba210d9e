"""The handoff as values: both roles over an ordered wire, every illegal move, every message's way through protobuf."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.handoff import wire
from kvlease.handoff.decode_attempt import (
    AskRoom,
    BlockRefused,
    BlockVerified,
    Committed,
    Conclude,
    DecodeAttempt,
    DecodeHappening,
    Ended,
    OpenLease,
    RoomReserved,
    SendUp,
    decode_step,
)
from kvlease.handoff.document import document
from kvlease.handoff.errors import IllegalMove
from kvlease.handoff.lease_book import LeaseBook
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Admitted,
    AttemptDown,
    Commit,
    Complete,
    Epoch,
    FinishReason,
    Grant,
    Incarnation,
    LeaseId,
    Nonce,
    Proposal,
    Ready,
    Receipt,
    Rejected,
    RejectReason,
    RequestId,
    SamplingParams,
    TenantId,
)
from kvlease.handoff.prefill_attempt import (
    BlockSent,
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
from kvlease.handoff.tables import (
    DECODE_TABLE,
    PREFILL_TABLE,
    DecodeEvent,
    DecodeState,
    PrefillState,
    decode_move,
)
from kvlease.handoff.verdicts import ABORTS, REJECTIONS, PrefillFacts, aborted, judge_prompt, rejected
from kvlease.v1 import kvlease_pb2 as pb

GRANT = Grant(LeaseId(b"l" * 16), Nonce(b"n" * 16), Epoch(7))


def proposal(num_tokens: int = 40, max_tokens: int = 8) -> Proposal:
    return Proposal(
        RequestId("r"),
        1,
        TenantId("t"),
        tuple(range(num_tokens)),
        max_tokens,
        SamplingParams(),
        frozenset({99}),
        5.0,
        Incarnation(b"i" * 16),
        Epoch(7),
        b"f" * 16,
    )


class Wire:
    """Both roles, joined by an ordered wire; blocks land as soon as they are sent."""

    def __init__(self, num_tokens: int = 40, max_tokens: int = 8, *, prefill_is_scripted: bool = False) -> None:
        self._prefill_is_scripted = prefill_is_scripted  # then the test says what prefill says
        self.prefill = PrefillAttempt.of(proposal(num_tokens, max_tokens), 16)
        self.decode = DecodeAttempt(num_tokens, self.prefill.num_blocks)
        self.book = LeaseBook()
        self.said: list[object] = []
        self.ends: list[object] = []
        self.num_freed = 0

    def at_prefill(self, happening: PrefillHappening) -> None:
        self.prefill, actions = prefill_step(self.prefill, happening)
        for action in actions:
            if isinstance(action, SendDown):
                self.said.append(action.message)
                self.at_decode(action.message)
            self.num_freed += isinstance(action, Free)
            if isinstance(action, Over):
                self.said.append("over")

    def at_decode(self, happening: DecodeHappening) -> None:
        self.decode, actions = decode_step(self.decode, happening)
        todo = deque(actions)
        while todo:
            action = todo.popleft()
            match action:
                case AskRoom():
                    self.at_decode(RoomReserved(GRANT, 1))
                case OpenLease(lease):
                    self.book.open(lease)
                case SendUp(message):
                    assert not isinstance(message, Proposal)
                    if not self._prefill_is_scripted:
                        self.at_prefill(message)
                case Conclude(outcome):
                    self.ends.append(outcome)

    def send_what_may_be_sent(self) -> None:
        while self.prefill.may_send:
            position = self.prefill.num_sent
            self.at_decode(BlockVerified(self.book.verify(GRANT.lease_id, position)))
            self.at_prefill(BlockSent())


def test_a_prompt_of_one_chunk_asks_for_its_grant_when_its_first_token_is_known() -> None:
    both = Wire()
    both.at_prefill(Judged(Admitted(0)))
    both.at_prefill(Started(in_one_chunk=True))
    assert both.said == [Admitted(0)]
    both.at_prefill(ChunkComputed(40, 5))
    both.send_what_may_be_sent()
    assert both.ends == [Committed(5)]
    assert both.prefill.state is PrefillState.RECEIPTED
    assert both.num_freed == 1


def test_a_prompt_of_several_chunks_sends_while_it_computes() -> None:
    both = Wire()
    both.at_prefill(Judged(Admitted(0)))
    both.at_prefill(Started(in_one_chunk=False))
    assert Ready() in both.said
    both.at_prefill(ChunkComputed(20, None))
    both.send_what_may_be_sent()
    assert both.prefill.num_sent == 1  # 16 of the 20 tokens make a whole block
    both.at_prefill(ChunkComputed(40, 5))
    both.send_what_may_be_sent()
    assert both.ends == [Committed(5)]


@pytest.mark.parametrize(("max_tokens", "token", "reason"), [(1, 5, FinishReason.LENGTH), (8, 99, FinishReason.STOP)])
def test_a_text_that_ends_with_its_first_token_is_never_offered(
    max_tokens: int, token: int, reason: FinishReason
) -> None:
    both = Wire(max_tokens=max_tokens)
    both.at_prefill(Judged(Admitted(0)))
    both.at_prefill(Started(in_one_chunk=True))
    both.at_prefill(ChunkComputed(40, token))
    assert both.ends == [Complete(token, reason)]
    assert Ready() not in both.said
    assert len(both.book) == 0


def test_a_rejection_is_the_only_word_and_costs_nothing() -> None:
    both = Wire()
    verdict = rejected(RejectReason.QUEUE_FULL, "full")
    both.at_prefill(Judged(verdict))
    assert both.ends == [verdict]
    assert both.said == [verdict, "over"]
    assert both.num_freed == 0


@pytest.mark.parametrize(
    "commit", [Commit(1, 40, 5), Commit(3, 16, 5), Commit(4, 40, 5)], ids=["blocks", "tokens", "more"]
)
def test_a_manifest_that_disagrees_is_refused(commit: Commit) -> None:
    both = Wire(prefill_is_scripted=True)
    for message in (Admitted(0), Ready(), commit):
        both.at_decode(message)
    (end,) = both.ends
    assert isinstance(end, Aborted)
    assert end.reason is AbortReason.MANIFEST_MISMATCH


def test_a_manifest_alone_commits_nothing() -> None:
    both = Wire(prefill_is_scripted=True)
    for message in (Admitted(0), Ready(), Commit(3, 40, 5)):
        both.at_decode(message)
    assert both.decode.state is DecodeState.CLOSING
    assert both.ends == []


def test_a_refused_block_ends_the_attempt_and_names_the_check() -> None:
    both = Wire(prefill_is_scripted=True)
    for happening in (Admitted(0), Ready(), BlockRefused("digest", "not these bytes")):
        both.at_decode(happening)
    (end,) = both.ends
    assert isinstance(end, Aborted)
    assert "digest" in end.message


def test_a_grant_for_another_epoch_is_a_protocol_error() -> None:
    attempt = PrefillAttempt.of(proposal(), 16)
    for happening in (Judged(Admitted(0)), Started(in_one_chunk=False)):
        attempt, _ = prefill_step(attempt, happening)
    attempt, actions = prefill_step(attempt, Grant(GRANT.lease_id, GRANT.nonce, Epoch(8)))
    assert attempt.state is PrefillState.ABORTED
    (said,) = [action.message for action in actions if isinstance(action, SendDown)]
    assert isinstance(said, Aborted)
    assert said.reason is AbortReason.PROTOCOL_ERROR


DOWN = st.sampled_from(
    [
        Admitted(0),
        Ready(),
        Commit(3, 40, 5),
        Complete(5, FinishReason.STOP),
        rejected(RejectReason.DRAINING, "bye"),
        aborted(AbortReason.CANCELLED, "gone"),
    ]
)


@given(st.lists(DOWN | st.just(Ended(aborted(AbortReason.PEER_LOST, "lost"))), max_size=12))
def test_whatever_prefill_says_an_attempt_ends_at_most_once(happenings: list[DecodeHappening]) -> None:
    both = Wire(prefill_is_scripted=True)
    for happening in happenings:
        both.at_decode(happening)
    assert len(both.ends) == int(both.decode.is_over)


UP = st.sampled_from(
    [
        Judged(Admitted(0)),
        Started(in_one_chunk=True),
        Started(in_one_chunk=False),
        GRANT,
        Receipt(3),
        EndedHere(aborted(AbortReason.CANCELLED, "gone")),
    ]
)


@given(st.lists(UP, max_size=12))
def test_whatever_decode_says_blocks_are_freed_at_most_once(happenings: list[PrefillHappening]) -> None:
    attempt, num_freed, num_over = PrefillAttempt.of(proposal(), 16), 0, 0
    for happening in happenings:
        attempt, actions = prefill_step(attempt, happening)
        num_freed += sum(isinstance(action, Free) for action in actions)
        num_over += sum(isinstance(action, Over) for action in actions)
    assert num_freed <= 1
    assert num_over == int(attempt.is_over)


def test_every_state_is_reached_and_terminal_states_have_no_way_out() -> None:
    for table, first in ((DECODE_TABLE, DecodeState.PROPOSED), (PREFILL_TABLE, PrefillState.RECEIVED)):
        reached = {str(first)} | {str(target) for moves in table.values() for target in moves.values()}
        assert reached == {str(state) for state in table}
    assert not any(DECODE_TABLE[state] for state in (DecodeState.COMMITTED, DecodeState.REJECTED, DecodeState.ABORTED))


def test_an_illegal_move_names_role_state_and_event() -> None:
    with pytest.raises(IllegalMove, match="decode cannot take Commit arrives while proposed"):
        decode_move(DecodeState.PROPOSED, DecodeEvent.COMMIT)


def test_every_reason_has_a_treatment() -> None:
    assert set(REJECTIONS) == set(RejectReason)
    assert set(ABORTS) == set(AbortReason)


def test_prefills_verdict_names_both_numbers() -> None:
    facts = PrefillFacts(688, 1024, 1000, 0, 4, False, Epoch(7), b"f" * 16)
    assert judge_prompt(proposal(688), facts) == Admitted(0)
    verdict = judge_prompt(proposal(689), facts)
    assert isinstance(verdict, Rejected)
    assert "689" in verdict.message
    assert "688" in verdict.message


@pytest.mark.parametrize("message", [proposal(), GRANT, Receipt(3)])
def test_what_goes_up_comes_back_equal(message: Proposal | Grant | Receipt) -> None:
    data = wire.encode_up(message).SerializeToString()
    assert wire.decode_up(pb.AttemptUp.FromString(data)) == message


@given(DOWN)
def test_what_goes_down_comes_back_equal(message: AttemptDown) -> None:
    data = wire.encode_down(message).SerializeToString()
    assert wire.decode_down(pb.AttemptDown.FromString(data)) == message


@pytest.mark.parametrize(
    "message",
    [
        pb.AttemptUp(),
        pb.AttemptUp(propose=pb.Propose()),
        pb.AttemptUp(grant=pb.Grant(lease_id=b"short", nonce=b"n" * 16)),
        pb.AttemptUp(
            propose=pb.Propose(prompt_token_ids=[1], max_tokens=1, sampling=pb.Sampling(temperature=float("nan")))
        ),
    ],
)
def test_what_makes_no_sense_is_a_wire_error(message: pb.AttemptUp) -> None:
    with pytest.raises(wire.WireError):
        wire.decode_up(message)


def test_the_document_is_as_the_tables_are() -> None:
    path = Path(__file__).parents[2] / "docs" / "protocol.md"
    assert path.read_text() == document(), "run: python -m kvlease.handoff.document > docs/protocol.md"
