import pytest


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a tiny Qwen2, in which no test writes."""
    from tests.workers.model.tiny import save_tiny_model

    return save_tiny_model(tmp_path_factory.mktemp("model"))
