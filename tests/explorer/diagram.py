"""A way to a broken promise, drawn as a sequence diagram: clients, decode, prefill, and what went between them."""

from __future__ import annotations

from tests.explorer.events import FAULT_NAMES, Event, perform
from tests.explorer.requests import Scenario
from tests.explorer.search import Violation
from tests.explorer.world import World

_COLUMN = 26
_HEAD = f"{'':>34}  {'client':^10}{'decode':^{_COLUMN}}{'prefill':^{_COLUMN}}"


def draw(scenario: Scenario, violation: Violation) -> str:
    """One line an event, the messages that it caused below it; the last event breaks the promise."""
    world, lines = World(scenario), [_HEAD]
    for event in violation.events:
        state = world.save()
        world.load(state)
        is_fault = is_a_fault(event)
        mark = "!" if is_fault else " "
        lines.append(f"{mark} {_words(event):<32}  {'|':^10}{'|':^{_COLUMN}}{'|':^{_COLUMN}}".rstrip())
        try:
            perform(world, event, is_fault=is_fault)
        except Exception:  # noqa: BLE001 - it is what the diagram leads to
            break
        finally:
            lines += [_arrow(said) for said in world.said]
    return "\n".join([*lines, f"  {violation.text}"])


def is_a_fault(event: Event) -> bool:
    """A move of the system's own carries no fault's argument."""
    name, *arguments = event
    if name in ("end pass", "end step"):
        return arguments[0] != -1
    if name == "end landing":
        return arguments[0] != ""
    return name in FAULT_NAMES


def _words(event: Event) -> str:
    name, *arguments = event
    words = [f"{a[0]}.{a[1]}" if isinstance(a, tuple) else str(a) for a in arguments if a not in (-1, "")]
    return " ".join([str(name), *words])


def _arrow(said: str) -> str:
    way, words = said[:4], said[5:]
    indent = " " * 36
    if way in ("D->P", "P->D", "P=>D"):
        body = f" {words} ".center(_COLUMN - 2, "=" if "=" in way else "-")
        arrow = f"{body}>" if way[0] == "D" else f"<{body}"
        return f"{indent}{'|':^10}{'':{_COLUMN // 2}}{arrow}"
    if way == "D->C":
        return f"{indent}{'':5}<{f' {words} '.center(_COLUMN // 2 + 3, '-')}"
    return f"{indent}{'|':^10}{words:^{_COLUMN}}".rstrip()
