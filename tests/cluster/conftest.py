"""One tiny model and its oracle for all tests of whole pairs."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvlease.models.tiny import make_tiny_model
from tests.cluster.harness import Oracle


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def oracle(model: Path) -> Oracle:
    return Oracle(model)
