"""Values survive the wire; foreign bytes give a value or `WireError`, nothing else."""

from __future__ import annotations

import contextlib
from dataclasses import replace

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvlease.handoff.limits import Limits
from kvlease.handoff.messages import (
    AbortReason,
    Admitted,
    AttemptDown,
    AttemptUp,
    ChoiceFinished,
    Commit,
    Complete,
    FinishReason,
    Ready,
    Receipt,
    RejectReason,
    TokensGenerated,
)
from kvlease.handoff.verdicts import aborted, rejected
from kvlease.handoff.wire import (
    WireError,
    decode_down,
    decode_event,
    decode_request,
    decode_up,
    encode_down,
    encode_event,
    encode_up,
)
from kvlease.peering.limits import Limits as ChannelLimits
from kvlease.sampling.limits import Limits as SamplingLimits
from kvlease.sampling.params import SamplingParams
from kvlease.sampling.tokens import DrawnToken, TokenLogprobs
from kvlease.v1 import kvlease_pb2 as pb
from tests.handoff.joined import GRANT, proposal

numbers = st.integers(0, 2**31 - 1)
logprobs = st.floats(-100, 0, width=32)
told = st.builds(TokenLogprobs, logprobs, st.lists(st.tuples(numbers, logprobs), max_size=20).map(tuple))
further = st.lists(st.builds(DrawnToken, numbers, st.none() | told), max_size=3).map(tuple)
downs: st.SearchStrategy[AttemptDown] = st.one_of(
    st.builds(Admitted, numbers),
    st.just(Ready()),
    st.builds(Commit, numbers, numbers, numbers, st.none() | told, further),
    st.builds(Complete, numbers, st.sampled_from(FinishReason), st.none() | told, further),
    st.builds(rejected, st.sampled_from(RejectReason), st.text(), st.text()),
    st.builds(aborted, st.sampled_from(AbortReason), st.text()),
)
samplings = st.builds(
    SamplingParams,
    temperature=st.floats(0, 2),
    top_p=st.floats(0.01, 1),
    top_k=st.integers(0, 2**32 - 1),
    seed=st.integers(0, 2**64 - 1),
    min_tokens=st.integers(0, 1),
    min_p=st.floats(0, 1),
    repetition_penalty=st.floats(0.01, 100),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    top_logprobs=st.none() | st.integers(0, 20),
    logit_bias=st.dictionaries(numbers, st.floats(-100, 100), max_size=5).map(lambda bias: tuple(bias.items())),
)
ups: st.SearchStrategy[AttemptUp] = st.one_of(
    st.just(GRANT),
    st.builds(Receipt, numbers),
    st.builds(proposal, st.integers(1, 50), st.integers(1, 50), samplings, num_choices=st.integers(1, 16)),
)


@given(downs)
def test_what_prefill_says_arrives_as_it_was(message: AttemptDown) -> None:
    assert decode_down(pb.AttemptDown.FromString(encode_down(message).SerializeToString())) == message


@given(ups)
def test_what_decode_says_arrives_as_it_was(message: AttemptUp) -> None:
    assert decode_up(pb.AttemptUp.FromString(encode_up(message).SerializeToString())) == message


@given(numbers, st.sampled_from(FinishReason), numbers)
def test_the_end_of_a_choice_arrives_as_it_was(choice: int, reason: FinishReason, num_generated: int) -> None:
    event = ChoiceFinished(choice, reason, num_generated)
    assert decode_event(pb.GenerateEvent.FromString(encode_event(event).SerializeToString())) == event


def test_the_largest_wishes_fit_beside_a_prompt_in_one_message() -> None:
    bias = tuple((2**32 - 1 - token_id, -99.9) for token_id in range(SamplingLimits().max_logit_bias))
    ends = frozenset(range(2**32 - Limits().max_end_tokens, 2**32))
    full = SamplingParams(1.9, 0.9, 2**31, 2**64 - 1, logit_bias=bias, top_logprobs=20)
    asked = replace(proposal(sampling=full, num_choices=16), end_token_ids=ends)
    assert encode_up(asked).ByteSize() < ChannelLimits().message_bytes // 2
    most = DrawnToken(2**32 - 1, TokenLogprobs(-1.5, tuple((2**32 - 1 - n, -2.5) for n in range(20))))
    commit = Commit(2**31, 2**31, 7, most.logprobs, (most,) * (Limits().max_choices - 1))
    assert encode_down(commit).ByteSize() < ChannelLimits().message_bytes // 2


def test_what_a_message_leaves_out_asks_for_nothing() -> None:
    message = encode_up(proposal())
    message.propose.sampling.CopyFrom(pb.Sampling(top_p=1.0))
    message.propose.ClearField("num_choices")
    assert decode_up(message) == proposal()


def test_too_many_choices_are_a_wire_error() -> None:
    message = encode_up(proposal())
    message.propose.num_choices = 17
    with pytest.raises(WireError, match="17 choices"):
        decode_up(message)


@given(st.lists(st.tuples(numbers, told), max_size=4), st.booleans(), numbers)
def test_tokens_arrive_with_what_is_told_of_them(
    tokens: list[tuple[int, TokenLogprobs]], is_told: bool, choice: int
) -> None:
    told_of = tuple(each for _, each in tokens) if is_told else ()
    event = TokensGenerated(tuple(token for token, _ in tokens), told_of, choice)
    assert decode_event(pb.GenerateEvent.FromString(encode_event(event).SerializeToString())) == event


@given(st.binary(max_size=64))
def test_foreign_bytes_are_a_value_or_a_wire_error(data: bytes) -> None:
    with contextlib.suppress(WireError, DecodeError):
        decode_down(pb.AttemptDown.FromString(data))
    with contextlib.suppress(WireError, DecodeError):
        decode_up(pb.AttemptUp.FromString(data))
    with contextlib.suppress(WireError, DecodeError):
        decode_event(pb.GenerateEvent.FromString(data))
    with contextlib.suppress(WireError, DecodeError):
        decode_request(pb.GenerateRequest.FromString(data))


def test_empty_messages_and_strange_reasons_are_wire_errors() -> None:
    with pytest.raises(WireError, match="AttemptUp"):
        decode_up(pb.AttemptUp())
    with pytest.raises(WireError, match="AttemptDown"):
        decode_down(pb.AttemptDown())
    with pytest.raises(WireError, match="Rejected"):
        decode_down(pb.AttemptDown(rejected=pb.Rejected(reason="whim")))
    with pytest.raises(WireError, match="Tokens"):
        decode_event(pb.GenerateEvent(tokens=pb.Tokens(token_ids=[1, 2], logprobs=[pb.TokenLogprobs()])))
    with pytest.raises(WireError, match="Tokens"):
        decode_event(pb.GenerateEvent(tokens=pb.Tokens(token_ids=[1], logprobs=[pb.TokenLogprobs(top_token_ids=[1])])))
    with pytest.raises(WireError, match="Commit"):
        decode_down(pb.AttemptDown(commit=pb.Commit(logprobs=pb.TokenLogprobs(logprob=1.0))))
    with pytest.raises(WireError, match="Grant"):
        decode_up(pb.AttemptUp(grant=pb.Grant(lease_id=b"short", nonce=b"n" * 16)))
