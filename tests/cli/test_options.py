from __future__ import annotations

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from kvlease.cli.errors import ConfigurationError
from kvlease.cli.options import COMMANDS, Invocation, build_parser, flag_of, from_process, render
from kvlease.cli.settings import Settings, option_of, options_of
from tests.cli.serving import ROOT


@pytest.fixture(autouse=True)
def _no_settings_around(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [name for name in os.environ if name.upper().startswith("KVLEASE_")]:
        monkeypatch.delenv(name)


def refusal(*argv: str) -> str:
    with pytest.raises(ConfigurationError) as caught:
        from_process(argv)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize(("flag", "env", "file"), list(itertools.product([True, False], repeat=3)))
def test_flag_wins_over_environment_over_file_over_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flag: bool, env: bool, file: bool
) -> None:
    config = tmp_path / "kvlease.toml"
    config.write_text("max_queue = 3\n" if file else "")
    if env:
        monkeypatch.setenv("KVLEASE_MAX_QUEUE", "2")
    argv = ["serve", "--config", str(config), *(["--max-queue", "1"] if flag else [])]
    invocation = from_process(argv)
    expected, origin = next(
        (value, origin)
        for given, value, origin in [
            (flag, 1, "--max-queue"),
            (env, 2, "KVLEASE_MAX_QUEUE (environment)"),
            (file, 3, f"max_queue ({config})"),
            (True, 256, None),
        ]
        if given
    )
    assert invocation.settings.max_queue == expected
    assert invocation.origins.get("max_queue") == origin


def test_a_bad_value_is_one_line_that_names_where_it_stands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = tmp_path / "kvlease.toml"
    config.write_text("port = 70000\n")
    assert refusal("serve", "--config", str(config)).startswith(f"port ({config}): ")
    monkeypatch.setenv("KVLEASE_PORT", "many")
    assert refusal("serve", "--config", str(config)).startswith("KVLEASE_PORT (environment): ")
    assert refusal("serve", "--config", str(config), "--port", "-1").startswith("--port: ")


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--port", "x"),
        ("--port", "65536"),
        ("--dtype", "float16"),
        ("--device", "tpu"),
        ("--prefill-servers", "0"),
        ("--block-size", "0"),
        ("--prefill-blocks", "-1"),
        ("--ring-bytes", "lots"),
        ("--deadline", "nan"),
        ("--deadline", "0"),
        ("--drain", "inf"),
        ("--transport", "pigeon"),
        ("--log-level", "loud"),
        ("--model", ""),
    ],
)
def test_a_malformed_flag_is_refused_by_name(flag: str, value: str) -> None:
    assert refusal("serve", f"{flag}={value}").startswith(f"{flag}: ")


@pytest.mark.parametrize("value", ["host", "host:", ":1", "host:0", "host:65536", "host:x"])
def test_an_address_is_host_and_port(value: str) -> None:
    assert "is not an address" in refusal("decode", "--prefill-addresses", value)


@pytest.mark.parametrize("value", ["0.0.0.0", "::", "node:1", "[::1]", "two words", "a/b"])
def test_what_peers_are_told_must_be_a_host_that_they_can_connect_to(value: str) -> None:
    assert refusal("prefill", "--advertise", value).startswith("--advertise: ")


@pytest.mark.parametrize("value", ["", "node-7.cluster.local", "prefill-0", "10.0.0.7", "fd00::7"])
def test_a_name_or_an_address_alone_may_be_told_to_peers(value: str) -> None:
    assert from_process(["decode", "--advertise", value]).settings.advertise == value


def test_addresses_are_separated_by_commas_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = ("10.0.0.1:1", "[::1]:2")
    text = "10.0.0.1:1, [::1]:2"
    assert from_process(["decode", "--prefill-addresses", text]).settings.prefill_addresses == expected
    config = tmp_path / "kvlease.toml"
    config.write_text(f'prefill_addresses = ["{expected[0]}", "{expected[1]}"]\n')
    assert from_process(["decode", "--config", str(config)]).settings.prefill_addresses == expected
    monkeypatch.setenv("KVLEASE_PREFILL_ADDRESSES", text)
    assert from_process(["decode"]).settings.prefill_addresses == expected


def test_an_unknown_flag_variable_or_key_stops_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--prot" in refusal("serve", "--prot", "1")
    assert "--por" in refusal("serve", "--por", "1"), "a flag may not be shortened"
    assert "--decode-addresses" in refusal("prefill", "--decode-addresses", "a:1"), "a flag of another command"
    config = tmp_path / "kvlease.toml"
    config.write_text("prot = 1\n")
    assert refusal("serve", "--config", str(config)) == f"prot ({config}): there is no such option; did you mean port?"
    monkeypatch.setenv("KVLEASE_PROT", "1")
    assert refusal("serve") == "KVLEASE_PROT (environment): there is no such option; did you mean KVLEASE_PORT?"


@pytest.mark.parametrize("text", ["port = ", "[serve]\nport = 1\n", 'secret = "s"\n', "\xff"])
def test_a_file_that_is_not_options_is_refused_by_its_path(tmp_path: Path, text: str) -> None:
    config = tmp_path / "kvlease.toml"
    config.write_bytes(text.encode("latin-1"))
    assert str(config) in refusal("serve", "--config", str(config))


def test_a_missing_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    missing = str(tmp_path / "missing.toml")
    assert missing in refusal("serve", "--config", missing)
    monkeypatch.setenv("KVLEASE_CONFIG", missing)
    assert missing in refusal("serve")


def test_sizes_may_carry_a_unit() -> None:
    assert from_process(["serve", "--ring-bytes", "1MiB"]).settings.ring_bytes == 1 << 20


@pytest.mark.parametrize("command", COMMANDS)
def test_what_print_config_prints_is_a_file_with_the_same_options(tmp_path: Path, command: str) -> None:
    argv = {"serve": ["--max-queue", "7", "--api-keys-file", 'a "b\\c'], "decode": ["--prefill-addresses", "a:1,b:2"]}
    first = from_process([command, *argv.get(command, [])])
    config = tmp_path / "kvlease.toml"
    config.write_text(render(first))
    second = from_process([command, "--config", str(config)])
    assert without_origin(second) == without_origin(first)


def without_origin(invocation: Invocation) -> dict[str, object]:
    return {name: getattr(invocation.settings, name) for name in Settings.model_fields}


def test_every_option_belongs_to_a_command_and_is_described() -> None:
    for name, field in Settings.model_fields.items():
        assert option_of(name).commands, name
        assert field.description, name


@pytest.mark.parametrize("command", COMMANDS)
def test_help_shows_every_option_of_the_command(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args([command, "--help"])
    assert caught.value.code == 0
    shown = capsys.readouterr().out
    assert [name for name in options_of(command) if f"  {flag_of(name)} " not in shown] == []


@pytest.mark.parametrize("argv", [["--help"], ["serve", "--help"], ["serve", "--print-config"], ["status", "--help"]])
def test_help_loads_nothing_heavy(argv: list[str]) -> None:
    program = (
        "import atexit, sys; from kvlease.cli.main import main;"
        "heavy = {'torch', 'transformers', 'grpc', 'tokenizers', 'fastapi', 'numpy'};"
        "atexit.register(lambda: print(sorted(heavy & sys.modules.keys()), file=sys.stderr));"
        f"sys.exit(main({argv!r}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=20, check=True
    )
    assert done.stderr == "[]\n"
