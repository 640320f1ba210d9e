"""The moves of the two tables that no run of honest servers makes, each with its reason. Reaching one is a fault of this list."""

from __future__ import annotations

from tests.explorer.trails import Cell

UNREACHABLE: dict[Cell, str] = {
    (
        "prefill",
        "received",
        "it is ended",
    ): "a proposal is judged in the same step that receives it; nothing comes between",
}
