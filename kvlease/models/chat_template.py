"""Chat messages to a prompt, by the model's own template.

Owns the sandbox in which the template runs: no attribute that begins with an underscore, nothing that changes its
arguments, output of bounded length.

Never: reads a file but those of the model folder, or lets an error of the template out under another name.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Final, NoReturn, Self

import jinja2
import jinja2.exceptions
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.runtime
import jinja2.sandbox

from kvlease.models.chat_content import RenderedChat, tell_apart
from kvlease.models.errors import ModelFolderInvalid, TemplateFailed
from kvlease.models.files import read_json, read_text
from kvlease.models.limits import LIMITS, Limits

#: What a template may run into on messages that it was not written for.
_TEMPLATE_ERRORS: Final = (
    jinja2.TemplateError,
    TypeError,
    ValueError,
    LookupError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    MemoryError,
)


class ChatTemplate:
    """A compiled template with the special tokens that it may write. Safe to use from several threads."""

    def __init__(self, source: str, special_tokens: Mapping[str, str], *, limits: Limits = LIMITS) -> None:
        """Compile; raises ModelFolderInvalid for a syntax error. `source` is Jinja."""
        self.source = source
        self._special_tokens = dict(special_tokens)
        self._limits = limits
        try:
            self._template = _environment(limits).from_string(source)
        except jinja2.TemplateSyntaxError as error:
            raise ModelFolderInvalid(f"the chat template has a syntax error in line {error.lineno}: {error}") from error

    @classmethod
    def load(cls, folder: Path) -> Self | None:
        """Read the folder's template; None: it has none, so the model cannot chat. Raises ModelFolderInvalid."""
        configuration = read_json(folder / "tokenizer_config.json", missing={})
        source = find_template(folder, configuration)
        return None if source is None else cls(source, special_tokens(configuration))

    def render(self, messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool = True) -> str:
        """The prompt for `messages` (OpenAI's shape); raises TemplateFailed with one short line.

        The text holds the special tokens itself: encode it with `add_special_tokens=False`.
        """
        context = self._special_tokens | {
            "messages": list(messages),
            "add_generation_prompt": add_generation_prompt,
            "tools": None,
            "documents": None,
        }
        try:
            return self._bounded(self._template.generate(context))
        except _TEMPLATE_ERRORS as error:
            raise TemplateFailed(self._message(error)) from error

    def render_apart(self, messages: Sequence[Mapping[str, Any]], control_texts: Sequence[str]) -> RenderedChat:
        """The same, told apart from content that looks like one of the tokenizer's `control_texts`. Raises RequestInvalid."""
        return tell_apart(self.render, messages, control_texts)

    def _bounded(self, pieces: Iterable[str]) -> str:
        kept: list[str] = []
        num_chars = 0
        for piece in pieces:
            num_chars += len(piece)
            if num_chars > self._limits.max_rendered_chars:
                raise TemplateFailed(f"the rendered chat is longer than {self._limits.max_rendered_chars} characters")
            kept.append(piece)
        return "".join(kept)

    def _message(self, error: BaseException) -> str:
        line = " ".join(str(error).split()) or type(error).__name__
        return f"the model's chat template refused the messages: {line}"[: self._limits.max_template_message_chars]


def find_template(folder: Path, tokenizer_configuration: Mapping[str, Any]) -> str | None:
    """The template's source: `chat_template.jinja`, else the `chat_template` of the tokenizer's configuration."""
    path = folder / "chat_template.jinja"
    if path.is_file():
        return read_text(path)
    entry = tokenizer_configuration.get("chat_template")
    if isinstance(entry, list):  # several, by name
        named = {each.get("name"): each.get("template") for each in entry if isinstance(each, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


def special_tokens(tokenizer_configuration: Mapping[str, Any]) -> dict[str, str]:
    """`bos_token`, `eos_token` and their like, by name; both spellings of the configuration are read."""
    found: dict[str, str] = {}
    for name, value in tokenizer_configuration.items():
        if not name.endswith("_token"):
            continue
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


class _Sandbox(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """The library's sandbox, with a bound on repetition and powers: `'a' * 10**9` is one small expression."""

    intercepted_binops = frozenset(("*", "**"))
    max_chars = LIMITS.max_rendered_chars

    def call_binop(self, context: jinja2.runtime.Context, operator: str, left: Any, right: Any) -> Any:  # noqa: ANN401 - any value of a template
        """Refuse results that could be large; everything else is the library's."""
        counts = [value for value in (left, right) if isinstance(value, int)]
        sized = [value for value in (left, right) if isinstance(value, (str, bytes, list, tuple))]
        if operator == "*" and sized and counts and len(sized[0]) * counts[0] > self.max_chars:
            raise jinja2.exceptions.SecurityError("a repetition is too long")
        if operator == "**" and any(abs(value) > 64 for value in counts):
            raise jinja2.exceptions.SecurityError("a power is too large")
        return super().call_binop(context, operator, left, right)


class _GenerationBlock(jinja2.ext.Extension):
    """`{% generation %}` marks the assistant's words for training; here its body is simply rendered."""

    tags = {"generation"}  # noqa: RUF012 - the library's way to name them

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        """Replace the block by its body."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _environment(limits: Limits) -> jinja2.Environment:
    environment = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock])
    environment.max_chars = limits.max_rendered_chars
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as chat templates want it: plain characters, no HTML escapes (Jinja's own filter writes them)."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: object) -> NoReturn:
    raise jinja2.TemplateError(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)  # noqa: DTZ005 - templates mean the local date
