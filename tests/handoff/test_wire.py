"""Values survive the wire; foreign bytes give a value or `WireError`, nothing else."""

from __future__ import annotations

import contextlib

import pytest
from google.protobuf.message import DecodeError
from hypothesis import given
from hypothesis import strategies as st

from kvlease.handoff.messages import (
    AbortReason,
    Admitted,
    AttemptDown,
    AttemptUp,
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
from kvlease.sampling.params import SamplingParams
from kvlease.sampling.tokens import TokenLogprobs
from kvlease.v1 import kvlease_pb2 as pb
from tests.handoff.joined import GRANT, proposal

numbers = st.integers(0, 2**31 - 1)
logprobs = st.floats(-100, 0, width=32)
told = st.builds(TokenLogprobs, logprobs, st.lists(st.tuples(numbers, logprobs), max_size=20).map(tuple))
downs: st.SearchStrategy[AttemptDown] = st.one_of(
    st.builds(Admitted, numbers),
    st.just(Ready()),
    st.builds(Commit, numbers, numbers, numbers, st.none() | told),
    st.builds(Complete, numbers, st.sampled_from(FinishReason), st.none() | told),
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
    st.just(GRANT), st.builds(Receipt, numbers), st.builds(proposal, st.integers(1, 50), st.integers(1, 50), samplings)
)


@given(downs)
def test_what_prefill_says_arrives_as_it_was(message: AttemptDown) -> None:
    assert decode_down(pb.AttemptDown.FromString(encode_down(message).SerializeToString())) == message


@given(ups)
def test_what_decode_says_arrives_as_it_was(message: AttemptUp) -> None:
    assert decode_up(pb.AttemptUp.FromString(encode_up(message).SerializeToString())) == message


@given(st.lists(st.tuples(numbers, told), max_size=4), st.booleans())
def test_tokens_arrive_with_what_is_told_of_them(tokens: list[tuple[int, TokenLogprobs]], is_told: bool) -> None:
    event = TokensGenerated(tuple(token for token, _ in tokens), tuple(each for _, each in tokens) if is_told else ())
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
