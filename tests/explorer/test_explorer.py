"""Every run of the quick worlds keeps every promise, and both state tables are walked wholly. See docs/proof.md."""

from __future__ import annotations

import pytest

from tests.explorer.cells import UNREACHABLE
from tests.explorer.diagram import draw
from tests.explorer.ghost import Broken
from tests.explorer.requests import Scenario
from tests.explorer.scenarios import QUICK
from tests.explorer.search import Exploration, Search, Violation
from tests.explorer.trails import Cell, all_cells

_REACHED: dict[str, set[Cell]] = {}


def explore(scenario: Scenario) -> Exploration:
    found = Search(scenario).run()
    _REACHED[scenario.name] = found.cells
    return found


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("scenario", QUICK, ids=lambda scenario: scenario.name)
def test_every_run_keeps_every_promise(scenario: Scenario) -> None:
    found = explore(scenario)
    assert found.violation is None, "\n" + draw(scenario, found.violation)
    assert found.is_whole
    assert found.num_rests > 0, "a world that never comes to rest was not judged"


@pytest.mark.timeout(900)
def test_every_move_of_both_tables_is_made_or_known_to_be_impossible() -> None:
    reached: set[Cell] = set()
    for scenario in QUICK:
        reached |= _REACHED[scenario.name] if scenario.name in _REACHED else explore(scenario).cells
    assert all_cells() - reached == set(UNREACHABLE)
    assert not reached & set(UNREACHABLE)


def test_a_way_to_a_broken_promise_is_drawn() -> None:
    """The world is shown what it does not do: the drawing ends with the promise, whatever was drawn before."""
    events = (("arrive", 0), ("take up", (0, 1)), ("take down", (0, 1)), ("leave", 0))
    drawn = draw(QUICK[0], Violation("P6", str(Broken("P6", "it never ends")), events))
    assert "arrive 0" in drawn
    assert "- 0.1 Proposal -" in drawn
    assert "! leave 0" in drawn
    assert drawn.endswith("P6: it never ends")
