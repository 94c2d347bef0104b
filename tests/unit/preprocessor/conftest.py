from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.preprocessor.model_folder import write_model_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_folder(tmp_path_factory.mktemp("model"))
