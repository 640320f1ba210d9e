"""Attempts fed with whatever a peer may send: a value or `WireError`, then one end, and no text that was not agreed on."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvlease.handoff.decode_attempt import (
    Committed,
    Conclude,
    DecodeAttempt,
    FirstToken,
    OpenLease,
    RoomReserved,
    decode_step,
)
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Admitted,
    Commit,
    Complete,
    FinishReason,
    Ready,
    Rejected,
    RejectReason,
)
from kvlease.handoff.prefill_attempt import Judged, PrefillAttempt, Started, prefill_step
from kvlease.handoff.verdicts import PrefillFacts, judge_prompt
from kvlease.handoff.wire import WireError, decode_down, decode_event, decode_request, decode_up
from kvlease.v1 import kvlease_pb2 as pb
from tests.handoff.joined import BLOCK_SIZE, END_TOKEN, EPOCH, GRANT, proposal

VOCAB_SIZE = 100
FIRST = FirstToken(VOCAB_SIZE, 5, frozenset({END_TOKEN}))

numbers = st.integers(0, 2**32 - 1) | st.integers(0, 120)
longs = st.integers(0, 2**64 - 1) | st.just(int(EPOCH))
words = st.text(max_size=6)
names = st.binary(max_size=20) | st.just(bytes(16))
reasons = st.sampled_from([*RejectReason, *AbortReason, *FinishReason, "whim"])
samplings = st.builds(pb.Sampling, temperature=st.floats(), top_p=st.floats(), top_k=numbers, seed=longs) | st.builds(
    pb.Sampling,
    top_p=st.just(1.0),
    min_tokens=numbers,
    min_p=st.floats(),
    repetition_penalty=st.floats(),
    presence_penalty=st.floats(),
    frequency_penalty=st.floats(),
    logit_bias=st.lists(st.builds(pb.Bias, token_id=numbers, value=st.floats()), max_size=3),
    top_logprobs=st.none() | numbers,
)
told = st.none() | st.builds(
    pb.TokenLogprobs,
    logprob=st.floats(width=32),
    top_token_ids=st.lists(numbers, max_size=2),
    top_logprobs=st.lists(st.floats(width=32), max_size=2),
)
further = st.lists(st.builds(pb.DrawnToken, token_id=numbers, logprobs=told), max_size=2)
rejections = st.builds(pb.Rejected, reason=reasons, message=words, code=words, http_status=numbers)
aborts = st.builds(pb.Aborted, reason=reasons, message=words, code=words, http_status=numbers, retryable=st.booleans())
downs = st.one_of(
    st.builds(pb.AttemptDown, admitted=st.builds(pb.Admitted, num_queued=numbers)),
    st.just(pb.AttemptDown(ready=pb.Ready())),
    st.builds(pb.AttemptDown, rejected=rejections),
    st.builds(pb.AttemptDown, aborted=aborts),
    st.builds(
        pb.AttemptDown,
        commit=st.builds(
            pb.Commit, num_blocks=numbers, num_tokens=numbers, first_token_id=numbers, logprobs=told, further=further
        ),
    ),
    st.builds(
        pb.AttemptDown,
        complete=st.builds(pb.Complete, first_token_id=numbers, reason=reasons, logprobs=told, further=further),
    ),
).map(lambda message: message.SerializeToString())
proposals = st.builds(
    pb.Propose,
    request_id=words,
    attempt=numbers,
    tenant=words,
    prompt_token_ids=st.lists(numbers, max_size=20),
    max_tokens=numbers,
    sampling=samplings,
    end_token_ids=st.lists(numbers, max_size=3),
    remaining_ms=numbers,
    decode_incarnation=names,
    epoch=longs,
    fingerprint=names | st.just(b"f" * 16),
)
ups = st.one_of(
    st.builds(pb.AttemptUp, propose=proposals),
    st.builds(pb.AttemptUp, grant=st.builds(pb.Grant, lease_id=names, nonce=names, epoch=longs)),
    st.builds(pb.AttemptUp, receipt=st.builds(pb.Receipt, num_blocks=numbers)),
).map(lambda message: message.SerializeToString())
FACTS = PrefillFacts(16, 64, VOCAB_SIZE, 0, 8, draining=False, epoch=EPOCH, fingerprint=b"f" * 16)


@given(st.lists(downs | st.binary(max_size=10), max_size=8))
def test_whatever_prefill_says_decode_begins_only_what_it_can_stand_for(said: list[bytes]) -> None:
    attempt = DecodeAttempt(10, 3, first_token=FIRST)
    outcomes: list[object] = []
    for data in said:
        try:
            message = decode_down(pb.AttemptDown.FromString(data))
        except (WireError, DecodeError):
            continue
        attempt, actions = decode_step(attempt, message)
        if isinstance(message, Ready) and not attempt.is_over:
            attempt, actions = decode_step(attempt, RoomReserved(GRANT, 1))
        outcomes += [action.outcome for action in actions if isinstance(action, Conclude)]
    assert len(outcomes) <= 1
    assert not any(isinstance(outcome, Committed) for outcome in outcomes), "no block ever came"
    for outcome in outcomes:
        assert not isinstance(outcome, Rejected | Aborted) or 400 <= outcome.http_status < 600
        if isinstance(outcome, Complete):
            assert (outcome.first_token_id, outcome.reason) == (END_TOKEN, FinishReason.STOP)


@given(st.lists(ups | st.binary(max_size=10), max_size=8))
def test_whatever_decode_says_prefill_ends_once(said: list[bytes]) -> None:
    attempt = PrefillAttempt.of(proposal(), BLOCK_SIZE)
    attempt, _ = prefill_step(attempt, Judged(Admitted(0)))
    attempt, _ = prefill_step(attempt, Started(in_one_chunk=False))
    num_over = 0
    for data in said:
        try:
            message: Any = decode_up(pb.AttemptUp.FromString(data))
        except (WireError, DecodeError):
            continue
        if message.__class__.__name__ == "Proposal":
            verdict = judge_prompt(message, FACTS)
            assert isinstance(verdict, Rejected) or (
                len(message.prompt_token_ids) <= 16
                and max(message.prompt_token_ids) < VOCAB_SIZE
                and message.epoch == EPOCH
            )
            continue
        attempt, actions = prefill_step(attempt, message)
        num_over += sum(type(action).__name__ == "Over" for action in actions)
        assert attempt.num_sent == 0, "a message alone sends no block"
    assert num_over <= 1


@given(
    st.builds(
        pb.GenerateRequest,
        request_id=words,
        tenant=words,
        prompt_token_ids=st.lists(numbers, max_size=5),
        max_tokens=numbers,
        sampling=samplings,
        end_token_ids=st.lists(numbers, max_size=3),
        remaining_ms=numbers,
        prefill_candidates=st.lists(words, max_size=3),
    )
)
def test_a_request_that_a_sampler_or_a_clock_could_not_use_is_none(message: pb.GenerateRequest) -> None:
    try:
        request = decode_request(message)
    except WireError:
        return
    assert 0 <= request.sampling.temperature <= 2
    assert 0 < request.sampling.top_p <= 1
    assert request.remaining_s > 0
    assert request.max_tokens > 0
    assert request.prompt_token_ids


@pytest.mark.parametrize("status", [0, 99, 200, 302, 399, 600, 2**32 - 1])
def test_an_error_with_a_status_that_no_error_has_is_none(status: int) -> None:
    rejection = pb.Rejected(reason="mismatch", http_status=status)
    with pytest.raises(WireError, match=f"Rejected: .*{status}"):
        decode_down(pb.AttemptDown(rejected=rejection))
    with pytest.raises(WireError, match=f"Aborted: .*{status}"):
        decode_event(pb.GenerateEvent(aborted=pb.Aborted(reason="deadline", http_status=status)))
    with pytest.raises(ValueError, match="400 to 599"):
        Rejected(RejectReason.MISMATCH, "", "", status)


def test_what_is_quoted_of_a_peer_is_short() -> None:
    with pytest.raises(WireError) as caught:
        decode_down(pb.AttemptDown(rejected=pb.Rejected(reason="x" * 100_000, http_status=400)))
    assert len(str(caught.value)) < 300


def test_bytes_that_are_no_message_are_a_wire_error() -> None:
    with pytest.raises(WireError, match="no message"):
        decode_down(None)
    with pytest.raises(WireError, match="no message"):
        decode_event(None)


@pytest.mark.parametrize(
    ("complete", "max_tokens", "named"),
    [
        (Complete(VOCAB_SIZE, FinishReason.LENGTH), 1, "token is 100, the vocabulary has 100"),
        (Complete(42, FinishReason.LENGTH), 5, "with length, decode finds no reason to"),
        (Complete(42, FinishReason.STOP), 5, "with stop, decode finds no reason to"),
        (Complete(42, FinishReason.STOP), 1, "with stop, decode finds length"),
        (Complete(END_TOKEN, FinishReason.LENGTH), 1, "with length, decode finds stop"),
    ],
)
def test_a_text_that_ends_without_a_reason_is_an_error_not_a_short_text(
    complete: Complete, max_tokens: int, named: str
) -> None:
    attempt = DecodeAttempt(10, 3, first_token=FirstToken(VOCAB_SIZE, max_tokens, frozenset({END_TOKEN})))
    attempt, _ = decode_step(attempt, Admitted(0))
    ended, (conclude,) = decode_step(attempt, complete)
    assert ended.is_over
    assert isinstance(conclude, Conclude)
    assert isinstance(conclude.outcome, Aborted)
    assert conclude.outcome.reason is AbortReason.MANIFEST_MISMATCH
    assert named in conclude.outcome.message


def test_a_manifest_with_a_token_outside_the_vocabulary_commits_nothing() -> None:
    attempt = DecodeAttempt(10, 3, first_token=FIRST)
    for happening in (Admitted(0), Ready(), RoomReserved(GRANT, 1)):
        attempt, actions = decode_step(attempt, happening)
    assert any(isinstance(action, OpenLease) for action in actions)
    _, (conclude,) = decode_step(attempt, Commit(3, 10, 2**32 - 1))
    assert isinstance(conclude, Conclude)
    assert isinstance(conclude.outcome, Aborted)
    assert "4294967295" in conclude.outcome.message
