"""One tiny model folder for the tests of this package."""

from pathlib import Path

import pytest

from kvlease.models.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama; read only."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")
