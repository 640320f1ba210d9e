"""Whatever a client sends in a body, or a decode server in its stream: one proper end, and no crash, hang or senseless text."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc.aio
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.app import load_model
from gateway.cluster import DECODE
from gateway.decode_claims import Expected
from gateway.errors import RequestRefused
from gateway.jobs import Bounds, Job, parse_chat, parse_completion
from gateway.limits import Limits
from gateway.model import ServedModel
from gateway.openai_errors import ApiError
from gateway.rpc import GrpcDecodeClient, GrpcStatusClient
from kvlease.handoff.messages import (
    Aborted,
    AbortReason,
    Finished,
    FinishReason,
    GenerationEvent,
    GenerationRequest,
    Rejected,
    RejectReason,
    RequestId,
    TenantId,
    TokensGenerated,
)
from kvlease.peering.channels import make_server
from kvlease.peering.limits import Limits as PeeringLimits
from kvlease.sampling.params import SamplingParams
from kvlease.v1 import kvlease_pb2 as pb
from tests.gateway.serving import FakeDecode, config, decode_facts, on_loop, serving

SECRET = "s"
TERMINAL = (Finished, Rejected, Aborted)


@pytest.fixture(scope="module")
def model(tiny: Path) -> ServedModel:
    return load_model(config(model=tiny))


@asynccontextmanager
async def raw_decode(says: Sequence[bytes]) -> AsyncIterator[str]:
    """A decode server's double that answers every call with these bytes, one after the other."""

    async def generate(_request: bytes, context: Any) -> None:
        for message in says:
            await context.write(message)

    async def status(_request: bytes, _context: Any) -> bytes:
        return says[0]

    handlers: dict[str, Any] = {
        "Generate": grpc.unary_stream_rpc_method_handler(generate),
        "Status": grpc.unary_unary_rpc_method_handler(status),
    }
    server = make_server(SECRET, 4096, PeeringLimits())
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("kvlease.v1.Decode", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)


def request_for(max_tokens: int = 8) -> GenerationRequest:
    identity = (RequestId("r"), TenantId("t"))
    return GenerationRequest(*identity, (1, 2, 3), max_tokens, SamplingParams(), frozenset(), 5.0, ())


async def heard(says: Sequence[bytes]) -> list[GenerationEvent]:
    """What the gateway's client makes of it."""
    async with raw_decode(says) as address:
        client = GrpcDecodeClient(address, SECRET, 4096)
        async with asyncio.timeout(5), aclosing(client.generate(request_for())) as events:
            found = [event async for event in events]
        await client.close()
    return found


numbers = st.integers(0, 2**32 - 1)
reasons = st.sampled_from([*FinishReason, *RejectReason, *AbortReason, "whim", ""])
words = st.text(max_size=8)
rejections = st.builds(pb.Rejected, reason=reasons, message=words, code=words, http_status=numbers, param=words)
aborts = st.builds(pb.Aborted, reason=reasons, message=words, code=words, http_status=numbers, retryable=st.booleans())
finishes = st.builds(pb.Finished, reason=reasons, num_prompt_tokens=numbers, num_generated_tokens=numbers)
tokens = st.builds(pb.Tokens, token_ids=st.lists(numbers, max_size=4))
events = st.one_of(
    st.builds(pb.GenerateEvent, tokens=tokens),
    st.builds(pb.GenerateEvent, finished=finishes),
    st.builds(pb.GenerateEvent, rejected=rejections),
    st.builds(pb.GenerateEvent, aborted=aborts),
).map(lambda event: event.SerializeToString())


@settings(max_examples=60, deadline=None)
@given(st.lists(events | st.binary(max_size=12), max_size=4))
def test_any_stream_from_decode_has_one_end_with_a_proper_status(says: list[bytes]) -> None:
    found = asyncio.run(heard(says))
    assert [isinstance(event, TERMINAL) for event in found] == [False] * (len(found) - 1) + [True]
    end = found[-1]
    if isinstance(end, Rejected | Aborted):
        assert 400 <= end.http_status < 600
        assert len(end.message) < 600


def of(**event: Any) -> bytes:
    return pb.GenerateEvent(**event).SerializeToString()


def some(*token_ids: int) -> bytes:
    return of(tokens=pb.Tokens(token_ids=token_ids))


def finished(reason: str, num_prompt: int, num_generated: int) -> bytes:
    return of(finished=pb.Finished(reason=reason, num_prompt_tokens=num_prompt, num_generated_tokens=num_generated))


#: `hello` is two or more tokens to the tiny model; the true count is put in for PROMPT.
PROMPT = 77
NONSENSE = {
    "a rejection like a success": ([of(rejected=pb.Rejected(reason="mismatch", http_status=200))], "got 200"),
    "a rejection without a status": ([of(rejected=pb.Rejected(reason="mismatch"))], "got 0"),
    "an abort beyond all statuses": ([of(aborted=pb.Aborted(reason="cancelled", http_status=700))], "got 700"),
    "an unknown reason": ([of(finished=pb.Finished(reason="whim" * 1000))], "whim"),
    "an empty event": ([b""], "empty"),
    "no message": ([b"\xff\xff\xff"], "no message"),
    "a token outside the vocabulary": ([some(300)], "token 300, the vocabulary has 300"),
    "the last of all numbers": ([some(1, 2**32 - 1)], "4294967295"),
    "more tokens than wanted": ([some(1, 2, 3, 4, 5)], "5 tokens, 4 were asked for"),
    "more and more tokens": ([some(1, 2), some(3, 4), some(5)], "5 tokens, 4 were asked for"),
    "another prompt": ([finished("stop", 1, 1)], "a prompt of 1 tokens"),
    "more counted than sent": ([some(1), finished("stop", PROMPT, 3)], "counted 3 tokens, 1 came"),
    "fewer counted than sent": ([some(1, 2), finished("stop", PROMPT, 1)], "counted 1 tokens, 2 came"),
    "a length that is not reached": ([some(1), finished("length", PROMPT, 1)], "after 1 tokens of 4"),
    "no length at all": ([finished("length", PROMPT, 0)], "after 0 tokens of 4"),
}


@pytest.mark.parametrize(("says", "named"), NONSENSE.values(), ids=list(NONSENSE))
@pytest.mark.parametrize("stream", [False, True])
@on_loop
async def test_nonsense_from_decode_is_an_error_that_names_it(
    tiny: Path, stream: bool, says: list[bytes], named: str
) -> None:
    model = load_model(config(model=tiny))
    num_prompt = len(model.codec.encode("hello", True))
    says = [_counted(message, num_prompt) for message in says]
    async with raw_decode(says) as address:
        client = GrpcDecodeClient(address, SECRET, 4096)
        double = FakeDecode(decode_facts(), script=client.generate)
        async with serving(tiny, double) as running:
            answer = await running.complete(max_tokens=4, stream=stream)
            await running.until_quiet()
        await client.close()
    if answer.status_code == 200:  # tokens were sent before
        assert stream
        error = json.loads(answer.text.split("data: ")[-1])["error"]
        assert 'finish_reason":"stop' not in answer.text.replace(" ", "")
    else:
        assert answer.status_code == 502
        error = answer.json()["error"]
    assert error["code"] == "protocol_error"
    assert named in error["message"]
    assert len(error["message"]) < 600


def _counted(message: bytes, num_prompt: int) -> bytes:
    event = pb.GenerateEvent()
    if b"\xff\xff" in message:
        return message
    event.ParseFromString(message)
    if event.finished.num_prompt_tokens == PROMPT:
        event.finished.num_prompt_tokens = num_prompt
    return event.SerializeToString()


@given(
    st.lists(st.lists(st.integers(-1, 12), max_size=3), max_size=4), st.sampled_from(FinishReason), st.integers(0, 6)
)
def test_what_passes_is_text_of_the_vocabulary_in_the_length_that_was_asked_for(
    sent: list[list[int]], reason: FinishReason, num_counted: int
) -> None:
    expected = Expected(vocab_size=10, num_prompt=3, max_tokens=4)
    passed: list[int] = []
    for token_ids in sent:
        if expected.contradiction(TokensGenerated(tuple(token_ids)), len(passed)) is not None:
            return
        passed += token_ids
    assert len(passed) <= 4
    assert all(0 <= token_id < 10 for token_id in passed)
    if expected.contradiction(Finished(reason, 3, num_counted), len(passed)) is None:
        assert num_counted in (len(passed), len(passed) + 1)
        assert reason is FinishReason.STOP or len(passed) == num_counted == 4


@pytest.mark.parametrize("said", [b"\xff\xff\xff", b"", pb.ServerStatus(blocks_total=2**64 - 1).SerializeToString()])
@on_loop
async def test_a_status_of_any_bytes_is_facts_or_a_lost_poll(said: bytes) -> None:
    async with raw_decode([said]) as address:
        client = GrpcStatusClient(DECODE, address, SECRET, 4096)
        facts = await client.status()
        assert (facts is None) == (said == b"\xff\xff\xff")
        await client.close()


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.sampled_from(["tiny", "user"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)
#: Parameters, as the two APIs name them.
NAMES = [
    "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k", "seed",
    "stop", "stream", "stream_options", "n", "logprobs", "tools", "user", "metadata", "echo", "response_format",
]  # fmt: skip
messages = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "system", "x"]), "content": st.text(max_size=20) | values},
        optional={"name": st.text(max_size=5) | values, "tool_calls": values},
    ),
    max_size=3,
)
bodies = st.builds(
    lambda model, prompt, chat, rest: {"model": model, "prompt": prompt, "messages": chat} | rest,
    st.just("tiny") | values,
    st.text(max_size=30) | st.lists(st.integers(-1, 400), max_size=5) | values,
    messages | values,
    st.dictionaries(st.sampled_from(NAMES), values, max_size=3),
)
BOUNDS = Bounds(max_model_len=256, default_max_tokens=16, limits=Limits())


@settings(max_examples=300, deadline=None)
@given(body=bodies, is_chat=st.booleans(), whole=st.booleans())
def test_any_body_is_a_job_that_fits_or_a_400_that_names_the_parameter(
    body: dict[str, Any], is_chat: bool, whole: bool, model: ServedModel
) -> None:
    if not whole:
        body.pop("prompt" if is_chat else "messages", None)
    data = json.dumps(body).encode()
    outcome = parsed(data, is_chat, model)
    if isinstance(outcome, Job):
        assert 0 < outcome.num_tokens <= 256
        assert model.first_unknown(outcome.prompt_token_ids) is None
    else:
        assert outcome.http_status in (400, 404)
        assert outcome.code
        assert len(outcome.message) < 1000
        json.dumps(outcome.body()).encode()


def parsed(data: bytes, is_chat: bool, model: ServedModel) -> Job | ApiError:
    try:
        return (parse_chat if is_chat else parse_completion)(data, model, BOUNDS)
    except RequestRefused as refused:
        return refused.error


@given(data=st.binary(max_size=40) | st.text(max_size=40).map(str.encode), is_chat=st.booleans())
def test_any_bytes_are_a_400(data: bytes, is_chat: bool, model: ServedModel) -> None:
    with pytest.raises(RequestRefused) as refused:
        (parse_chat if is_chat else parse_completion)(data, model, BOUNDS)
    assert refused.value.error.http_status == 400


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 1_000_000,
        b'{"a":' * 200_000 + b"1" + b"}" * 200_000,
        b'{"model": "tiny", "prompt": ' + b"[" * 100 + b"]" * 100 + b"}",
        b'{"model": "tiny", "prompt": "a", "seed": ' + b"9" * 100_000 + b"}",
        b'{"model": "tiny", "prompt": [' + b"9" * 5_000 + b"]}",
        b'{"model": "tiny", "prompt": "\\ud800"}',
        b'{"model": "tiny", "prompt": "a", "' + b"x" * 100_000 + b'": 1}',
        b'{"model": "' + b"x" * 100_000 + b'", "prompt": "a"}',
        json.dumps({"model": "tiny", "prompt": "a", "stop": [chr(n) for n in range(17)]}).encode(),
        json.dumps({"model": "tiny", "prompt": "a", "temperature": 1e308}).encode(),
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b"\xef\xbb\xbf{}",
        b"\x00",
    ],
    ids=range(13),
)
def test_hostile_json_is_refused_shortly(data: bytes, model: ServedModel) -> None:
    with pytest.raises(RequestRefused) as refused:
        parse_completion(data, model, BOUNDS)
    assert refused.value.error.http_status in (400, 404)
    assert len(refused.value.error.message) < 1000
