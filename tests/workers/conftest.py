from pathlib import Path

import pytest

from tests.workers.rollout import tiny


@pytest.fixture(scope="session")
def tiny_model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of `tiny.random_model(0)`."""
    return tiny.save_model(tmp_path_factory.mktemp("model") / "tiny")
