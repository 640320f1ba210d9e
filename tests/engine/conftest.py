"""Tiny models, each made once for the whole run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from kvlease.engine.runner import ModelRunner
from kvlease.models.tiny import make_tiny_model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The folder of the tiny model of a family."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = make_tiny_model(tmp_path_factory.mktemp(family), family, seed=7)
        return folders[family]

    return folder


@pytest.fixture
def make_runner(folder_of: Callable[[str], Path]) -> Callable[..., ModelRunner]:
    """Makes a runner with an empty pool."""

    def make(
        family: str = "llama", *, block_size: int = 16, num_blocks: int = 24, dtype: str = "float32"
    ) -> ModelRunner:
        return ModelRunner.load(
            folder_of(family), dtype=dtype, device="cpu", num_blocks=num_blocks, block_size=block_size
        )

    return make
