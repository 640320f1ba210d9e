"""docs/protocol.md says what the tables say."""

from __future__ import annotations

from pathlib import Path

from kvlease.handoff.document import document


def test_the_document_is_as_the_tables_are() -> None:
    path = Path(__file__).parents[2] / "docs" / "protocol.md"
    assert path.read_text() == document(), "run: python -m kvlease.handoff.document > docs/protocol.md"
