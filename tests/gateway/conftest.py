"""One tiny model folder for the gateway's tests, and its tokenizer."""

from pathlib import Path

import pytest

from kvlease.models.tiny import make_tiny_model
from kvlease.models.tokenizer import Tokenizer


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model's folder; read only."""
    return make_tiny_model(tmp_path_factory.mktemp("gateway") / "tiny")


@pytest.fixture(scope="session")
def tokenizer(tiny: Path) -> Tokenizer:
    """Its tokenizer."""
    return Tokenizer.load(tiny)
