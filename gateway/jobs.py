"""From a request's body to what will be generated: every check that needs no other server.

Never: touches the event loop; it runs in a tokenizing thread, and is a pure function of body, model and limits.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from gateway.errors import RequestRefused
from gateway.limits import Limits
from gateway.model import ServedModel
from gateway.openai_errors import ApiError, echo, invalid, too_long
from gateway.schema import NEUTRAL_CHAT, NEUTRAL_COMPLETION, ChatBody, CompletionBody, parse_object, validated
from kvlease.models.chat_content import RenderedChat
from kvlease.models.errors import RequestInvalid
from kvlease.sampling.params import SamplingParams

COMPLETION_DEFAULT_TOKENS = 16
_ID_DIGITS = 10  # of the largest number that a token id can be
#: Below this, and below the share of any vocabulary's likeliest token, top_p means the likeliest token; it must not become 0 as a float32.
SMALLEST_TOP_P = 1e-6


@dataclass(frozen=True, slots=True)
class Job:
    """What one request asks for, checked and tokenized: `num_choices` texts of one prompt."""

    prompt_token_ids: tuple[int, ...]
    max_tokens: int
    sampling: SamplingParams
    end_token_ids: frozenset[int]
    stops: tuple[str, ...]
    is_stream: bool
    includes_usage: bool
    num_choices: int = 1

    @property
    def tells_logprobs(self) -> bool:
        """Whether the client hears how likely each token was."""
        return self.sampling.top_logprobs is not None

    @property
    def num_tokens(self) -> int:
        """The context that it may need."""
        return len(self.prompt_token_ids) + self.max_tokens


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a job must fit: `max_model_len` in tokens, the default for a chat's answer, and the gateway's limits."""

    max_model_len: int
    default_max_tokens: int
    limits: Limits


class Parser(Protocol):
    """Makes a job of a body; raises RequestRefused."""

    def __call__(self, data: bytes, model: ServedModel, bounds: Bounds) -> Job:
        """The job."""
        ...


def parse_completion(data: bytes, model: ServedModel, bounds: Bounds) -> Job:
    """POST /v1/completions."""
    body = validated(parse_object(data), CompletionBody, NEUTRAL_COMPLETION)
    _check_shared(body, model, bounds)
    text = body.prompt
    prompt = (
        _tokenized(text, lambda: model.codec.encode(text, True), model, bounds, "prompt")
        if isinstance(text, str)
        else _checked_ids(text, model)
    )
    default = COMPLETION_DEFAULT_TOKENS
    max_tokens = _output_length(body.max_tokens, default, prompt, bounds, ("prompt", "max_tokens"))
    return _job(body, model, prompt, max_tokens)


def parse_chat(data: bytes, model: ServedModel, bounds: Bounds) -> Job:
    """POST /v1/chat/completions."""
    body = validated(parse_object(data), ChatBody, NEUTRAL_CHAT)
    _check_shared(body, model, bounds)
    if body.max_tokens is not None and body.max_completion_tokens is not None:
        _refuse(invalid("Give max_completion_tokens or max_tokens, not both.", "max_tokens"))
    if body.top_logprobs and not body.logprobs:
        _refuse(invalid("'top_logprobs' needs 'logprobs': true.", "top_logprobs"))
    chat = _rendered(body, model)
    prompt = _tokenized(chat.text, lambda: model.codec.encode_chat(chat), model, bounds, "messages")
    param = "max_tokens" if body.max_tokens is not None else "max_completion_tokens"
    wanted = body.max_tokens if body.max_tokens is not None else body.max_completion_tokens
    max_tokens = _output_length(wanted, bounds.default_max_tokens, prompt, bounds, ("messages", param))
    return _job(body, model, prompt, max_tokens)


def _refuse(error: ApiError) -> None:
    raise RequestRefused(error)


def _check_shared(body: CompletionBody | ChatBody, model: ServedModel, bounds: Bounds) -> None:
    if body.model != model.name:
        message = f"The model '{echo(body.model)}' does not exist; this gateway serves '{model.name}'."
        _refuse(ApiError(404, message, "model_not_found", "model"))
    if body.stream_options is not None and not body.stream:
        _refuse(invalid("'stream_options' needs 'stream': true.", "stream_options"))
    limits = bounds.limits
    if len(body.stop) > limits.max_stop_strings:
        _refuse(invalid(f"'stop' takes at most {limits.max_stop_strings} strings.", "stop"))
    if any(len(stop) > limits.max_stop_chars for stop in body.stop):
        _refuse(invalid(f"A stop string has at most {limits.max_stop_chars} characters.", "stop"))
    named = body.stop_token_ids or []
    if len(named) > limits.max_stop_token_ids:
        _refuse(invalid(f"'stop_token_ids' takes at most {limits.max_stop_token_ids} ids.", "stop_token_ids"))
    if any(token_id >= model.vocab_size for token_id in named):
        _refuse(invalid(f"'stop_token_ids': ids are 0 to {model.vocab_size - 1}.", "stop_token_ids"))


def _rendered(body: ChatBody, model: ServedModel) -> RenderedChat:
    if model.template is None:
        message = f"'{model.name}' has no chat template; use /v1/completions."
        raise RequestRefused(invalid(message, "messages", "no_chat_template"))
    try:
        messages = [message.for_template() for message in body.messages]
        return model.template.render_apart(messages, model.codec.control_texts)
    except RequestInvalid as failure:
        message = f"The model's chat template does not take these messages: {failure}"
        raise RequestRefused(invalid(message, "messages", failure.code)) from None


def _tokenized(
    text: str, encode: Callable[[], list[int]], model: ServedModel, bounds: Bounds, param: str
) -> tuple[int, ...]:
    if len(text.encode()) >= bounds.max_model_len:
        at_least = model.bound.min_tokens(text)
        if at_least >= bounds.max_model_len:
            _refuse(_far_too_long(at_least, bounds.max_model_len, param))
    try:
        token_ids = tuple(encode())
    except RequestInvalid as failure:
        raise RequestRefused(invalid(str(failure), param, failure.code)) from None
    if not token_ids:
        _refuse(invalid("The prompt has no tokens.", param))
    return token_ids


def _far_too_long(at_least: int, max_model_len: int, param: str) -> ApiError:
    message = (
        f"This model's maximum context length is {max_model_len} tokens, but the prompt has at least {at_least} tokens, "
        "told from its bytes. Shorten the prompt."
    )
    return invalid(message, param, "context_length_exceeded")


def _checked_ids(token_ids: tuple[int, ...], model: ServedModel) -> tuple[int, ...]:
    position = model.first_unknown(token_ids)
    if position is not None:
        bounds = f"0 to {model.vocab_size - 1}"
        _refuse(
            invalid(f"'prompt': the token id at position {position} is not in the vocabulary ({bounds}).", "prompt")
        )
    return token_ids


def _output_length(
    wanted: int | None, default: int, prompt: tuple[int, ...], bounds: Bounds, params: tuple[str, str]
) -> int:
    """How many tokens may be generated. `params`: what to blame for a prompt too long, and for too many tokens wanted."""
    num_prompt, most = len(prompt), bounds.max_model_len
    if num_prompt >= most:
        _refuse(too_long(num_prompt, 0, most, params[0]))
    if wanted is not None and num_prompt + wanted > most:
        _refuse(too_long(num_prompt, wanted, most, params[1]))
    return min(default, most - num_prompt) if wanted is None else wanted


def _logit_bias(entries: dict[str, float], model: ServedModel) -> tuple[tuple[int, float], ...]:
    """Token ids are written as strings, since JSON has no other keys; two spellings of one id are one too many."""
    bias: dict[int, float] = {}
    for name, value in entries.items():
        token_id = int(name) if name.isascii() and name.isdigit() and len(name) <= _ID_DIGITS else model.vocab_size
        if token_id >= model.vocab_size or token_id in bias:
            ids = f"'{echo(name)}' is not one of the ids 0 to {model.vocab_size - 1}, each once"
            _refuse(invalid(f"'logit_bias': {ids}.", "logit_bias"))
        bias[token_id] = value
    return tuple(sorted(bias.items()))


def _job(body: CompletionBody | ChatBody, model: ServedModel, prompt: tuple[int, ...], max_tokens: int) -> Job:
    if (body.min_tokens or 0) > max_tokens:
        _refuse(invalid(f"'min_tokens' {body.min_tokens} is more than the {max_tokens} to generate.", "min_tokens"))
    sampling = SamplingParams(
        temperature=1.0 if body.temperature is None else body.temperature,
        top_p=1.0 if body.top_p is None else max(body.top_p, SMALLEST_TOP_P),
        top_k=body.top_k or 0,
        seed=secrets.randbits(64) if body.seed is None else body.seed % 2**64,
        min_tokens=body.min_tokens or 0,
        min_p=body.min_p or 0.0,
        repetition_penalty=1.0 if body.repetition_penalty is None else body.repetition_penalty,
        presence_penalty=body.presence_penalty or 0.0,
        frequency_penalty=body.frequency_penalty or 0.0,
        top_logprobs=body.wanted_logprobs(),
        logit_bias=_logit_bias(body.logit_bias or {}, model),
    )
    options = body.stream_options
    own_ends = frozenset[int]() if body.ignore_eos else model.end_token_ids
    return Job(
        prompt_token_ids=prompt,
        max_tokens=max_tokens,
        sampling=sampling,
        end_token_ids=own_ends | frozenset(body.stop_token_ids or ()),
        stops=body.stop,
        is_stream=bool(body.stream),
        includes_usage=options is not None and bool(options.include_usage),
        num_choices=body.n or 1,
    )
