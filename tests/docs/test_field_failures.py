"""docs/field-failures.md names every fault once, and only tests that exist."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs" / "field-failures.md").read_text()
ENTRIES = re.findall(r"^- \*\*B(\d+)\*\* (.+)$", TEXT, re.MULTILINE)
#: The faults that were collected, by number.
NUMBERS = (
    1, 3, 4, 5, 7, 8, 9, 11, 13, 15, 17, 19, 21, 23, 24, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 56,
    57, 59, 61, 63, 65, 67, 69, 71, 73, 75, 77, 79, 80, 81, 83, 85, 87, 89, 91, 93, 94, 95, 97, 99, 101, 103, 105, 107, 108,
    109, 111, 113, 115, 117, 119, 121, 123, 125, 127, 129, 131, 133, 135, 137, 139, 141, 143, 145, 147, 149, 151, 153, 155,
    157, 159, 161,
)  # fmt: skip


@cache
def functions_of(path: str) -> frozenset[str]:
    """The functions of a file, those in classes included; nothing is imported."""
    file = ROOT / path
    if not file.is_file():
        return frozenset()
    kinds = ast.FunctionDef | ast.AsyncFunctionDef
    return frozenset(node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds))


def test_every_fault_has_one_entry_in_order() -> None:
    assert tuple(int(number) for number, _ in ENTRIES) == NUMBERS
    assert len(ENTRIES) == TEXT.count("\n- "), "every line of the lists is an entry"


def test_every_test_that_is_named_exists() -> None:
    named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", TEXT)
    assert len(named) == TEXT.count("::test_"), "each is written as path::test"
    assert [f"{path}::{name}" for path, name in named if name not in functions_of(path)] == []


def test_every_entry_is_held_by_a_test_or_says_what_is_open_or_impossible() -> None:
    silent = [number for number, text in ENTRIES if not re.search(r"::test_|\bOpen: |\b[Ii]mpossible here: ", text)]
    assert silent == []
