"""The default model in three processes, started once for every test that only asks it."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.whole.serving import POOL_FLAGS, Served, served


@pytest.fixture(scope="session")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served(tmp_path_factory.mktemp("serve"), *POOL_FLAGS) as running:
        yield running
