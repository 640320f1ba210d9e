"""The rules that linters cannot say, each a function from a file to complaints.

Never: looks at behaviour; that is what the other tests are for.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PACKAGES = ("decode_server", "gateway", "kvlease", "prefill_server", "transport")
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
MAX_LINES_OF_DOCUMENT = {"README.md": 150}
MAX_ADR_LINES = 60

FORBIDDEN_MODULES = re.compile(r"utils?|common|helpers?|misc|core|base|base_.*|manager|types")

#: Where an exception of any kind may be caught: the loops that must outlive one request, as `path::function`.
TOP_LEVEL_LOOPS: frozenset[str] = frozenset(
    {
        "gateway/exchange.py::Exchange._respond",
        "kvlease/cli/child.py::run_to_exit",
    }
)

#: Who may call what: a proof is made in one place, so that one reading shows that it is a proof.
ONLY_CALLED_IN = {
    "ReadableBlocks": "kvlease/kvcache/ledger.py",
    "ComputedBlocks": "kvlease/kvcache/ledger.py",
    "record_computed": "kvlease/engine/runner.py",
    "record_verified": "kvlease/kvcache/landing.py",
    "record_copied": "kvlease/kvcache/memory.py",
    "adopt": "kvlease/kvcache/memory.py",
}

# Written in pieces, or this file would break its own rule.
MACHINE_PATH = re.compile(r"(?<![\w.}])/(?:" + "work|root|home" + r")/")
REGISTRY_HOST = re.compile(r"\b(?:[\w-]+\.)*(?:pypi|pythonhosted|debian|npmjs|pytorch)" + r"\.(?:org|io|com)\b")


@dataclass(frozen=True, slots=True)
class Module:
    """One Python file of the project; `path` is relative to its root."""

    path: str
    source: str

    @property
    def tree(self) -> ast.Module:
        return ast.parse(self.source, self.path)

    @property
    def is_ours_to_ship(self) -> bool:
        return self.path.split("/")[0] in PACKAGES

    @property
    def is_test(self) -> bool:
        return self.path.startswith("tests/")


Rule = Callable[[Module], Iterator[str]]


def names_say_something(module: Module) -> Iterator[str]:
    for part in PurePosixPath(module.path).with_suffix("").parts:
        if FORBIDDEN_MODULES.fullmatch(part):
            yield f"a module named {part!r} says nothing: name it after what it owns"


def nobody_is_a_manager(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ClassDef) and node.name.endswith("Manager"):
            yield f"line {node.lineno}: class {node.name}: name it after what it does"


def modules_are_short(module: Module) -> Iterator[str]:
    num_lines = len(module.source.splitlines())
    if num_lines > MAX_MODULE_LINES:
        yield f"{num_lines} lines: at most {MAX_MODULE_LINES}; look for the missing noun"


def functions_are_short(module: Module) -> Iterator[str]:
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            num_lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if num_lines > MAX_FUNCTION_LINES:
                yield f"line {node.lineno}: {node.name} has {num_lines} lines: at most {MAX_FUNCTION_LINES}"


def modules_say_what_they_never_do(module: Module) -> Iterator[str]:
    if not module.is_ours_to_ship or module.path.endswith(("/__init__.py", "/errors.py")):
        return  # these say what a package is, and draw its tree of errors
    docstring = ast.get_docstring(module.tree) or ""
    if not re.search(r"(?:^|[.:;!?)]\s+|\n\s*)Never\b", docstring):
        yield "the module docstring has no sentence beginning 'Never'"


def proofs_are_made_in_one_place(module: Module) -> Iterator[str]:
    if not module.is_ours_to_ship:
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call):
            owner = ONLY_CALLED_IN.get(_last_name(node.func), module.path)
            if owner != module.path:
                yield f"line {node.lineno}: {_last_name(node.func)} may be called in {owner} only"


def exceptions_are_named(module: Module) -> Iterator[str]:
    for function, handler in _handlers(module.tree):
        if isinstance(handler.body[-1], ast.Raise):  # cleans up, or maps a foreign exception at its seam
            continue
        caught = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
        if any(kind is None or _last_name(kind) in {"Exception", "BaseException"} for kind in caught):
            place = f"{module.path}::{function}"
            if place not in TOP_LEVEL_LOOPS and not module.is_test:
                yield f"line {handler.lineno}: {place} catches everything and is no top-level loop"


def tests_wait_for_facts(module: Module) -> Iterator[str]:
    if not module.is_test or module.path == "tests/waiting.py":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "time.sleep":
            yield f"line {node.lineno}: time.sleep: use tests.waiting"
        if (
            isinstance(node, ast.ImportFrom)
            and node.module == "time"
            and any(name.name == "sleep" for name in node.names)
        ):
            yield f"line {node.lineno}: sleep is imported: use tests.waiting"


def protobuf_enters_the_handoff_by_one_door(module: Module) -> Iterator[str]:
    if not module.path.startswith("kvlease/handoff/") or module.path == "kvlease/handoff/wire.py":
        return
    for node in ast.walk(module.tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("kvlease.v1", "google.protobuf")):
            yield f"line {node.lineno}: only kvlease/handoff/wire.py imports {node.module}"


MODULE_RULES: tuple[Rule, ...] = (
    names_say_something,
    nobody_is_a_manager,
    modules_are_short,
    functions_are_short,
    modules_say_what_they_never_do,
    proofs_are_made_in_one_place,
    exceptions_are_named,
    tests_wait_for_facts,
    protobuf_enters_the_handoff_by_one_door,
)


def no_place_of_a_machine(text: str) -> Iterator[str]:
    """For any text file."""
    for number, line in enumerate(text.splitlines(), start=1):
        if found := MACHINE_PATH.search(line) or REGISTRY_HOST.search(line):
            yield f"line {number}: {found.group()!r} is a place of one machine or network"


def documents_are_short(path: str, text: str) -> Iterator[str]:
    """For markdown."""
    limit = MAX_ADR_LINES if path.startswith("docs/adr/") else MAX_LINES_OF_DOCUMENT.get(path)
    num_lines = len(text.splitlines())
    if limit is not None and num_lines > limit:
        yield f"{num_lines} lines: at most {limit}"


def links_lead_somewhere(path: Path, text: str) -> Iterator[str]:
    """For markdown: relative links name a file that is there, and a heading that it has."""
    for target in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)):
        if re.match(r"[a-z]+:", target):
            continue
        name, _, anchor = target.partition("#")
        there = path.parent / name if name else path
        if not there.exists():
            yield f"the link {target} leads nowhere"
        elif anchor and anchor not in _anchors(there.read_text(encoding="utf-8")):
            yield f"the link {target} names no heading of {there.name}"


def _anchors(text: str) -> set[str]:
    headings = re.findall(r"^#+ +(.+)$", text, flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def _last_name(node: ast.expr | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _handlers(tree: ast.AST, scope: str = "") -> Iterator[tuple[str, ast.ExceptHandler]]:
    """Every `except` with the dotted name of the function around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield from _handlers(node, f"{scope}.{node.name}".lstrip("."))
            continue
        if isinstance(node, ast.ExceptHandler):
            yield scope, node
        yield from _handlers(node, scope)
