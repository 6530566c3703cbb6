from __future__ import annotations

from pathlib import Path

import pytest

from tests.swarmnode.bulk.nodes import Model, make_model


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return make_model(tmp_path_factory.mktemp("bulk") / "pack")


@pytest.fixture
def store_folder(tmp_path: Path) -> Path:
    return tmp_path / "store"
