"""Explores every world and prints its figures, the last line for all of them.

python -m tests.explorer.exploring [--quick]
"""

from __future__ import annotations

import argparse
import sys

from tests.explorer.cells import UNREACHABLE
from tests.explorer.diagram import draw
from tests.explorer.scenarios import FULL, QUICK
from tests.explorer.search import Search
from tests.explorer.trails import Cell, all_cells


def main() -> None:
    """Exit 1 at the first broken promise, drawn, or if a move of the tables was neither made nor known to be impossible."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="the worlds that the tests walk")
    worlds = QUICK if parser.parse_args().quick else FULL
    num_states = num_moves = 0
    seconds, reached = 0.0, set[Cell]()
    for scenario in worlds:
        found = Search(scenario).run()
        print(
            f"{scenario.name}: {found.num_states} states, {found.num_moves} moves, {found.num_rests} ends, "
            f"depth {found.depth}, {found.seconds:.1f} s",
            flush=True,
        )
        if found.violation is not None:
            sys.exit(draw(scenario, found.violation))
        num_states, num_moves, seconds = (
            num_states + found.num_states,
            num_moves + found.num_moves,
            seconds + found.seconds,
        )
        reached |= found.cells
    if all_cells() - reached != set(UNREACHABLE):
        sys.exit(f"not made, or made though listed: {(all_cells() - reached) ^ set(UNREACHABLE)}")
    print(
        f"{len(worlds)} worlds, {num_states} states, {num_moves} moves, no promise broken; "
        f"{len(reached)} of {len(all_cells())} table moves made, {len(UNREACHABLE)} impossible; {seconds:.0f} s"
    )


if __name__ == "__main__":
    main()
