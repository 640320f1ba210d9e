"""The project keeps the rules of `tests/tidiness.py`, and each rule can fail."""

from __future__ import annotations

import functools
import subprocess
import tomllib
from pathlib import Path

import pytest

from tests import tidiness
from tests.tidiness import Module, Rule

ROOT = Path(__file__).resolve().parents[1]
GENERATED = "kvlease/v1/"


@functools.cache
def files() -> dict[str, str]:
    """Every text file of the project by its path, new ones that are not yet committed included."""
    command = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split("\0")
    found = {}
    for path in filter(None, listed):
        if (ROOT / path).is_file():
            data = (ROOT / path).read_bytes()
            if b"\0" not in data:
                found[path] = data.decode("utf-8")
    return found


def modules() -> list[Module]:
    return [
        Module(path, text) for path, text in files().items() if path.endswith(".py") and not path.startswith(GENERATED)
    ]


def documents() -> dict[str, str]:
    return {path: text for path, text in files().items() if path.endswith(".md")}


@pytest.mark.parametrize("rule", tidiness.MODULE_RULES, ids=lambda rule: rule.__name__)
def test_every_module_keeps(rule: Rule) -> None:
    complaints = [f"{module.path}: {complaint}" for module in modules() for complaint in rule(module)]
    assert not complaints, "\n" + "\n".join(complaints)


def test_no_file_names_a_place_of_one_machine_or_network() -> None:
    complaints = [
        f"{path}: {found}" for path, text in files().items() for found in tidiness.no_place_of_a_machine(text)
    ]
    assert not complaints, "\n" + "\n".join(complaints)


def test_documents_are_short() -> None:
    complaints = [
        f"{path}: {found}" for path, text in documents().items() for found in tidiness.documents_are_short(path, text)
    ]
    assert not complaints, "\n" + "\n".join(complaints)


def test_links_in_documents_lead_somewhere() -> None:
    complaints = [
        f"{path}: {found}"
        for path, text in documents().items()
        for found in tidiness.links_lead_somewhere(ROOT / path, text)
    ]
    assert not complaints, "\n" + "\n".join(complaints)


def test_every_package_has_its_layer() -> None:
    contracts = tomllib.loads(files()["pyproject.toml"])["tool"]["importlinter"]["contracts"]
    layers = next(contract["layers"] for contract in contracts if contract["id"] == "layers")
    known = {name.strip() for layer in layers for name in layer.split("|")}
    ours = {
        path.parent for path in map(Path, files()) if path.name == "__init__.py" and path.parts[0] in tidiness.PACKAGES
    }
    packages = {".".join(path.parts[:2]) for path in ours} - {"kvlease"}
    assert {name for name in packages if name.startswith("kvlease.")} <= known
    assert set(tidiness.PACKAGES) - {"kvlease"} <= known


def test_top_level_loops_are_where_they_are_said_to_be() -> None:
    there = {f"{module.path}::{function}" for module in modules() for function, _ in tidiness._handlers(module.tree)}
    expected = {loop for loop in tidiness.TOP_LEVEL_LOOPS if loop.split("::")[0] in files()}
    assert there >= expected


GOOD = '"""Owns one thing.\n\nNever: does another.\n"""\n'
LONG_FUNCTION = "def f():\n" + "    pass\n" * tidiness.MAX_FUNCTION_LINES
BAD_MODULES: list[tuple[Rule, str, str]] = [
    (tidiness.names_say_something, "kvlease/engine/utils.py", GOOD),
    (tidiness.names_say_something, "kvlease/common/block.py", GOOD),
    (tidiness.names_say_something, "transport/base_channel.py", GOOD),
    (tidiness.nobody_is_a_manager, "kvlease/engine/leases.py", "class LeaseManager: ..."),
    (tidiness.modules_are_short, "kvlease/engine/leases.py", "\n" * (tidiness.MAX_MODULE_LINES + 1)),
    (tidiness.functions_are_short, "kvlease/engine/leases.py", LONG_FUNCTION),
    (tidiness.functions_are_short, "kvlease/engine/leases.py", "async " + LONG_FUNCTION),
    (tidiness.modules_say_what_they_never_do, "kvlease/engine/leases.py", '"""Owns leases, nevertheless."""'),
    (tidiness.proofs_are_made_in_one_place, "decode_server/service.py", "blocks = ledger.ReadableBlocks(1, (0,), 3)"),
    (tidiness.proofs_are_made_in_one_place, "prefill_server/worker.py", "ComputedBlocks(1, (0,), 3)"),
    (tidiness.proofs_are_made_in_one_place, "kvlease/kvcache/landing.py", "ledger.record_computed(1, 2, 3, 4)"),
    (tidiness.proofs_are_made_in_one_place, "kvlease/engine/runner.py", "ledger.record_verified(1, 2, 3, 4)"),
    (tidiness.exceptions_are_named, "gateway/app.py", "def f():\n try: g()\n except Exception: pass"),
    (tidiness.exceptions_are_named, "gateway/app.py", "try: g()\nexcept: pass"),
    (tidiness.exceptions_are_named, "gateway/app.py", "try: g()\nexcept (OSError, BaseException): pass"),
    (tidiness.tests_wait_for_facts, "tests/gateway/test_app.py", "import time\ntime.sleep(1)"),
    (tidiness.tests_wait_for_facts, "tests/gateway/test_app.py", "from time import sleep"),
    (
        tidiness.protobuf_enters_the_handoff_by_one_door,
        "kvlease/handoff/roles.py",
        "from kvlease.v1 import kvlease_pb2",
    ),
]


@pytest.mark.parametrize(("rule", "path", "source"), BAD_MODULES)
def test_a_rule_complains_about_a_bad_module(rule: Rule, path: str, source: str) -> None:
    assert list(rule(Module(path, source)))


@pytest.mark.parametrize("rule", tidiness.MODULE_RULES, ids=lambda rule: rule.__name__)
def test_no_rule_complains_about_a_good_module(rule: Rule) -> None:
    assert not list(rule(Module("kvlease/engine/leases.py", GOOD + "def f(): return 1\n")))


@pytest.mark.parametrize(
    "path", ["/" + "work/x", "see /" + "root/.cache", "'/" + "home/me/'", "https://pypi" + ".org/simple"]
)
def test_a_place_of_one_machine_is_seen(path: str) -> None:
    assert list(tidiness.no_place_of_a_machine(path))


def test_a_dead_link_and_a_missing_heading_are_seen(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# One heading\n\n[a](page.md#one-heading) [b](page.md#two) [c](other.md) [d](https://example.invalid/x)\n"
    )
    complaints = list(tidiness.links_lead_somewhere(page, page.read_text()))
    assert [complaint.split()[2] for complaint in complaints] == ["page.md#two", "other.md"]


def test_a_long_document_is_seen() -> None:
    assert list(tidiness.documents_are_short("README.md", "\n" * 151))
    assert list(tidiness.documents_are_short("docs/adr/0001-x.md", "\n" * 61))
    assert not list(tidiness.documents_are_short("docs/glossary.md", "\n" * 500))
