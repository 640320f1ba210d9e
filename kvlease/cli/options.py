"""The command line, and the merging of flags, environment and file into `Settings`.

Never: prints a value of a secret; reads a file other than the configuration file.
"""

from __future__ import annotations

import argparse
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn, get_args, get_origin

from pydantic import ValidationError
from pydantic_settings import SettingsConfigDict, SettingsError

from kvlease import __version__
from kvlease.cli.errors import ConfigurationError
from kvlease.cli.settings import (
    DECODE,
    DOCTOR,
    ENV_PREFIX,
    GATEWAY,
    HEALTH,
    PREFILL,
    PREPARE,
    SERVE,
    STATUS,
    Settings,
    option_of,
    options_of,
)

CONFIG_VARIABLE = f"{ENV_PREFIX}CONFIG"
SECRET_VARIABLE = f"{ENV_PREFIX}SECRET"

COMMANDS = {
    SERVE: "start a gateway, prefill servers and decode servers on this machine",
    GATEWAY: "run one gateway (the HTTP API)",
    PREFILL: "run one prefill server",
    DECODE: "run one decode server",
    STATUS: "show every server of a running cluster",
    DOCTOR: "say what this machine needs to move blocks by RDMA, and try it",
    HEALTH: "ask the server of this machine, or of this container, whether it is well",
    PREPARE: "fetch and convert the model, so that servers find it ready",
}


@dataclass(frozen=True, slots=True)
class Invocation:
    """What was asked for. `origins` names, for each field, where its value came from."""

    command: str
    settings: Settings
    origins: Mapping[str, str]
    print_config: bool
    json: bool
    listen: bool = False


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Invocation:
    """The invocation that `argv` (without the program's name), the environment and the file add up to.

    Raises ConfigurationError; --help and --version exit.
    """
    arguments = vars(build_parser().parse_args(argv))
    command: str = arguments.pop("command")
    as_json, print_config = arguments.pop("json", False), arguments.pop("print_config", False)
    listen = arguments.pop("listen", False)
    file = arguments.pop("config", None) or environ.get(CONFIG_VARIABLE)
    refuse_unknown_variables(environ)
    path = Path(file) if file else None
    keys = read_keys(path) if path else frozenset()
    origins = find_origins(arguments, environ, keys, path)
    return Invocation(command, load_settings(arguments, path, origins), origins, print_config, as_json, listen)


def load_settings(flags: Mapping[str, str], path: Path | None, origins: Mapping[str, str]) -> Settings:
    """Flags over environment over file over defaults. Raises ConfigurationError that names the origin of a bad value."""

    class SettingsOfThisRun(Settings):
        model_config = SettingsConfigDict(toml_file=path)

    try:
        return SettingsOfThisRun(**flags)  # type: ignore[arg-type]  # flags are text; the fields' own checks convert them
    except ValidationError as error:
        raise ConfigurationError(describe(error, origins)) from None
    except SettingsError as error:
        raise ConfigurationError(str(error)) from None


def describe(error: ValidationError, origins: Mapping[str, str]) -> str:
    """The first fault of `error` in one line."""
    fault = error.errors(include_url=False)[0]
    name = str(fault["loc"][0])
    reason = fault["msg"].removeprefix("Value error, ")
    return f"{origins.get(name, name)}: {reason[:1].lower()}{reason[1:]}, got {fault['input']!r}"


def find_origins(
    flags: Mapping[str, str], environ: Mapping[str, str], keys: frozenset[str], path: Path | None
) -> dict[str, str]:
    """Where each field's value comes from, in the words of a user; fields at their default are absent."""
    variables = {name.upper() for name in environ}
    origins: dict[str, str] = {}
    for name in Settings.model_fields:
        if name in flags:
            origins[name] = flag_of(name)
        elif variable_of(name) in variables:
            origins[name] = f"{variable_of(name)} (environment)"
        elif name in keys:
            origins[name] = f"{name} ({path})"
    return origins


def refuse_unknown_variables(environ: Mapping[str, str]) -> None:
    """A misspelt variable would otherwise be a setting that silently does nothing."""
    known = {variable_of(name) for name in Settings.model_fields} | {CONFIG_VARIABLE, SECRET_VARIABLE}
    for variable in sorted(environ):
        if variable.upper().startswith(ENV_PREFIX) and variable.upper() not in known:
            raise ConfigurationError(f"{variable} (environment): there is no such option{suggestion(variable, known)}")


def read_keys(path: Path) -> frozenset[str]:
    """The file's keys, all of them options. Raises ConfigurationError for a file that cannot be read or an unknown key."""
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigurationError(f"{path}: cannot be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigurationError(f"{path}: not a TOML file: {error}") from None
    for key in table:
        if key not in Settings.model_fields:
            raise ConfigurationError(f"{key} ({path}): there is no such option{suggestion(key, Settings.model_fields)}")
    return frozenset(table)


def suggestion(name: str, known: Sequence[str] | Mapping[str, object] | set[str]) -> str:
    """'; did you mean x?', or nothing."""
    near = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {near[0]}?" if near else ""


def flag_of(name: str) -> str:
    """max_model_len -> --max-model-len."""
    return "--" + name.replace("_", "-")


def variable_of(name: str) -> str:
    """max_model_len -> KVLEASE_MAX_MODEL_LEN."""
    return ENV_PREFIX + name.upper()


class OneLineParser(argparse.ArgumentParser):
    """argparse, but a mistake is one line instead of the whole usage."""

    def error(self, message: str) -> NoReturn:
        """Raise what every other refused value raises, too."""
        raise ConfigurationError(f"{message} (see {self.prog} --help)")


def build_parser() -> argparse.ArgumentParser:
    """Flags of every command, from the table of settings."""
    parser = OneLineParser(
        prog="kvlease",
        description="Serve language models with prefill and decode in separate processes.",
        epilog="Each command has its own --help.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"kvlease {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for command, summary in COMMANDS.items():
        _add_flags(
            commands.add_parser(
                command,
                help=summary,
                description=summary[0].upper() + summary[1:] + ".",
                epilog=_EPILOG,
                allow_abbrev=False,
                argument_default=argparse.SUPPRESS,
                formatter_class=_Formatter,
                usage=f"kvlease {command} [options]",
            ),
            command,
        )
    commands.add_parser("bench", help="measure a server, a transport or the handoff")  # see kvlease.cli.bench
    return parser


_EPILOG = (
    f"Every option can also be set as {ENV_PREFIX}<NAME> in the environment or as `name = value` in the file given with"
    " --config (underscores instead of dashes). A flag wins over the environment, the environment over the file."
)


class _Formatter(argparse.HelpFormatter):
    """Wide enough for the longest flag beside its help."""

    def __init__(self, prog: str) -> None:
        super().__init__(prog, max_help_position=34)


def _add_flags(parser: argparse.ArgumentParser, command: str) -> None:
    """The command's options under their headings, then those that are about options."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for name in options_of(command):
        option = option_of(name)
        field = Settings.model_fields[name]
        group = groups.get(option.group) or groups.setdefault(option.group, parser.add_argument_group(option.group))
        shown = option.metavar or "|".join(_choices(field.annotation))
        group.add_argument(
            flag_of(name), metavar=shown, dest=name, help=f"{field.description}{_default(field.default)}"
        )
    about = parser.add_argument_group("configuration")
    about.add_argument("--config", metavar="FILE", help=f"a TOML file with options; or set {CONFIG_VARIABLE}")
    about.add_argument("--print-config", action="store_true", help="print the merged options and exit")
    if command == STATUS:
        parser.add_argument("--json", action="store_true", help="print the gateway's answer as it is")
    if command == DOCTOR:
        parser.add_argument("--json", action="store_true", help="print the findings for programs")
        parser.add_argument("--listen", action="store_true", help="answer the probes of another machine's --peer")


def _choices(annotation: object) -> tuple[str, ...]:
    """The words of a Literal."""
    assert get_origin(annotation) is not None, "a field without choices needs a metavar"
    return tuple(str(word) for word in get_args(annotation))


def _default(value: object) -> str:
    """How --help shows a default worth showing."""
    if value in (None, "", 0, ()):
        return ""
    shown = f"{value:g}" if isinstance(value, float) else str(value)
    return f" (default: {shown})"


def render(invocation: Invocation) -> str:
    """The merged options of the command as a TOML file, with the origin of each value that is not a default."""
    lines = []
    for name in options_of(invocation.command):
        value = getattr(invocation.settings, name)
        origin = invocation.origins.get(name)
        comment = f"  # from {origin}" if origin else ""
        lines.append(f"# {name} is not set" if value is None else f"{name} = {_toml(value)}{comment}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    """A TOML literal."""
    match value:
        case int() | float():
            return repr(value + 0)
        case tuple():
            return "[" + ", ".join(_toml(item) for item in value) + "]"
        case _:
            text = str(value).replace("\\", "\\\\").replace('"', '\\"')
            return f'"{text}"'


def from_process(argv: Sequence[str]) -> Invocation:
    """`parse` with this process's environment, which the library reads by itself."""
    return parse(argv, os.environ)
