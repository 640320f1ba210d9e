"""ARCHITECTURE.md names functions and tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "ARCHITECTURE.md").read_text()
OURS = ("gateway", "decode_server", "prefill_server", "transport", "kvlease")


def exists(dotted: str) -> bool:
    """Whether a module, or a name in one, is there; nothing is imported."""
    parts = dotted.split(".")
    for cut in range(len(parts), 0, -1):
        path = ROOT.joinpath(*parts[:cut])
        if path.is_dir() and cut == len(parts):
            return True
        if path.with_suffix(".py").is_file():
            return _has(ast.parse(path.with_suffix(".py").read_text()), parts[cut:])
    return False


def _has(node: ast.AST, names: list[str]) -> bool:
    if not names:
        return True
    inner = [
        child
        for child in ast.iter_child_nodes(node)
        if isinstance(child, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and child.name == names[0]
    ]
    return any(_has(child, names[1:]) for child in inner)


def test_every_function_and_module_that_is_named_exists() -> None:
    named = [name for name in re.findall(r"`([a-z_0-9]+(?:\.\w+)+)`", TEXT) if name.split(".")[0] in OURS]
    assert len(named) > 25
    assert [name for name in named if not exists(name)] == []


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)`", TEXT)
    assert named
    assert [name for name in named if not (ROOT / name).is_file()] == []


def test_each_of_the_ten_steps_names_its_function() -> None:
    steps = re.findall(r"^\| (\d+) \|.*\| (`.+) \|$", TEXT, re.MULTILINE)
    assert [int(number) for number, _ in steps] == list(range(1, 11))
