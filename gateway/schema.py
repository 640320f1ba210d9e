"""The two request bodies, field by field, as strict types. Pydantic stops here.

What would change the answer and is not built is refused by name, unless it has the value that changes nothing. What OpenAI
documents and what changes nothing here (`user`, `metadata`, …) is accepted and not read. Anything else is refused.

Never: coerces: a number in quotes is not a number, and true is not 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    StrictInt,
    TypeAdapter,
    ValidationError,
)
from pydantic_core import PydanticCustomError, from_json

from gateway.errors import RequestRefused
from gateway.openai_errors import ApiError, echo, invalid
from kvlease.handoff.limits import Limits as HandoffLimits
from kvlease.sampling.limits import Limits as SamplingLimits

_STRICT = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False, hide_input_in_errors=True)
_TOKEN_IDS = TypeAdapter(list[StrictInt])

_SAMPLING = SamplingLimits()
_HANDOFF = HandoffLimits()

MAX_TOKENS_BOUND = 2**31
TokenId = Annotated[int, Field(ge=0, lt=2**32)]
Penalty = Annotated[float, Field(ge=-_SAMPLING.max_penalty, le=_SAMPLING.max_penalty)]
TopLogprobs = Annotated[int, Field(ge=0, le=_SAMPLING.max_top_logprobs)]
Bias = Annotated[float, Field(ge=-_SAMPLING.max_bias, le=_SAMPLING.max_bias)]
Count = Annotated[int, Field(ge=1, lt=MAX_TOKENS_BOUND)]


def _check_prompt(value: object) -> str | tuple[int, ...]:
    if isinstance(value, str):
        if not value:
            raise PydanticCustomError("empty_prompt", "the prompt is empty")
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("prompt_type", "must be a string or a list of token ids")
    if not value:
        raise PydanticCustomError("empty_prompt", "the prompt is empty")
    if isinstance(value[0], (str, list)):
        raise PydanticCustomError(
            "unsupported_parameter", "several prompts in one request are not supported; send one each"
        )
    try:
        return tuple(_TOKEN_IDS.validate_python(value))
    except ValidationError as error:
        position = error.errors(include_url=False, include_input=False)[0]["loc"][0]
        raise PydanticCustomError(
            "prompt_type", "token ids must be integers; the one at position {position} is not", {"position": position}
        ) from None


def _check_stop(value: object) -> tuple[str, ...]:
    stops = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop_type", "must be a string or a list of strings")
    if not all(stops):
        raise PydanticCustomError("empty_stop", "a stop string must not be empty")
    return tuple(dict.fromkeys(stops))


def _check_content(value: object) -> str:
    """A string, or a list of text parts, which are joined by a line break."""
    if value is None:
        raise PydanticCustomError("content_type", "must be a string or a list of text parts")
    if isinstance(value, str):
        return value
    if not isinstance(value, list):
        raise PydanticCustomError("content_type", "must be a string or a list of text parts")
    return "\n".join(_text_of(part) for part in value)


def _text_of(part: object) -> str:
    if not isinstance(part, dict):
        raise PydanticCustomError("content_type", "each part must be an object with type and text")
    if part.get("type") != "text":
        raise PydanticCustomError("unsupported_content", "only parts of type 'text' are supported")
    text = part.get("text")
    if not isinstance(text, str) or set(part) - {"type", "text"}:
        raise PydanticCustomError("content_type", "a text part has a type and a string 'text', nothing else")
    return text


def _no_calls(value: object) -> None:
    if value not in (None, []):
        raise PydanticCustomError("unsupported_parameter", "tool calls are not supported")


Nothing = Annotated[None, BeforeValidator(_no_calls)]


class StreamOptions(BaseModel):
    """How a stream is written."""

    model_config = _STRICT
    include_usage: bool | None = None
    include_obfuscation: bool | None = None  # padding against traffic analysis: never added here


class _GenerationBody(BaseModel):
    """What both requests have. One step of inheritance, since Pydantic has no other way to share fields."""

    model_config = _STRICT
    model: str
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=_SAMPLING.min_repetition_penalty, le=_SAMPLING.max_repetition_penalty)] | None
    ) = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: Annotated[dict[str, Bias], Field(max_length=_SAMPLING.max_logit_bias)] | None = None
    seed: Annotated[int, Field(ge=-(2**63), lt=2**64)] | None = None
    stop: Annotated[tuple[str, ...], PlainValidator(_check_stop)] = ()
    stop_token_ids: list[TokenId] | None = None
    ignore_eos: bool | None = None
    min_tokens: Annotated[int, Field(ge=0, lt=MAX_TOKENS_BOUND)] | None = None
    n: Annotated[int, Field(ge=1, le=_HANDOFF.max_choices)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    service_tier: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    prompt_cache_retention: str | None = None


class CompletionBody(_GenerationBody):
    """POST /v1/completions."""

    prompt: Annotated[str | tuple[int, ...], PlainValidator(_check_prompt)]
    logprobs: TopLogprobs | None = None

    def wanted_logprobs(self) -> int | None:
        """How many alternatives are told with each token; None: not even its own likelihood."""
        return self.logprobs


class ChatMessage(BaseModel):
    """One message. `developer` is the newer name of `system`. The empty fields are those of an answer that is sent back."""

    model_config = _STRICT
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, PlainValidator(_check_content)]
    name: str | None = None
    refusal: None = None
    audio: None = None
    function_call: None = None
    tool_calls: Nothing = None
    annotations: Nothing = None

    def for_template(self) -> dict[str, object]:
        """The message as chat templates know it."""
        role = "system" if self.role == "developer" else self.role
        message: dict[str, object] = {"role": role, "content": self.content}
        return message if self.name is None else message | {"name": self.name}


class ChatBody(_GenerationBody):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: TopLogprobs | None = None
    parallel_tool_calls: bool | None = None  # without tools it means nothing
    prediction: dict[str, object] | None = None  # only ever makes an answer faster

    def wanted_logprobs(self) -> int | None:
        """How many alternatives are told with each token; None: not even its own likelihood."""
        return (self.top_logprobs or 0) if self.logprobs else None


#: Documented parameters that are not built, each with the values that ask for nothing.
NEUTRAL_COMPLETION: Mapping[str, tuple[object, ...]] = {
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
}
NEUTRAL_CHAT: Mapping[str, tuple[object, ...]] = {
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}

BodyT = TypeVar("BodyT", bound=BaseModel)


def parse_object(data: bytes) -> dict[str, object]:
    """The JSON object in a body. Raises RequestRefused (400) for anything else, lone surrogates and NaN included."""
    try:
        value = from_json(data, allow_inf_nan=False)
    except ValueError as error:
        raise RequestRefused(invalid(f"The body is not valid JSON: {error}", None, "invalid_json")) from None
    if not isinstance(value, dict):
        raise RequestRefused(invalid("The body must be a JSON object.", None, "invalid_json"))
    return value


def validated(fields: dict[str, object], body: type[BodyT], neutral: Mapping[str, tuple[object, ...]]) -> BodyT:
    """The fields as a body of that class. Raises RequestRefused (400) naming the first parameter that is wrong."""
    for name in [name for name in fields if name in neutral]:
        if not any(_same(fields[name], value) for value in neutral[name]):
            raise RequestRefused(
                invalid(f"'{name}' is not supported here; leave it out.", name, "unsupported_parameter")
            )
    try:
        return body.model_validate({name: value for name, value in fields.items() if name not in neutral})
    except ValidationError as error:
        raise RequestRefused(_first_fault(error)) from None


def _same(left: object, right: object) -> bool:
    """Equal, where True is not 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)


def _first_fault(error: ValidationError) -> ApiError:
    fault = error.errors(include_url=False, include_context=False, include_input=False)[0]
    param = echo(_path(fault["loc"]))
    match fault["type"]:
        case "missing":
            return invalid(f"'{param}' is required.", param, "missing_required_parameter")
        case "extra_forbidden":
            return invalid(f"Unknown parameter: '{param}'.", param, "unknown_parameter")
        case "unsupported_parameter":
            return invalid(f"'{param}': {fault['msg']}.", param, "unsupported_parameter")
        case kind:
            code = "invalid_type" if kind.endswith("_type") else "invalid_value"
            return invalid(f"'{param}': {fault['msg'].rstrip('.')}.", param, code)


def _path(location: tuple[int | str, ...]) -> str:
    """messages[0].content"""
    path = ""
    for step in location:
        path += f"[{step}]" if isinstance(step, int) else f".{step}" if path else step
    return path
