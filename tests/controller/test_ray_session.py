"""What ray.init raises becomes one sentence, whatever its type."""

from pathlib import Path

import pytest
import ray

from controller.config import load
from controller.observability.console import Console
from controller.session import ray_session
from tests.controller.config_workspace import write_workspace
from workers.errors import ResourceError


@pytest.mark.parametrize(
    ("address", "raised", "message"),
    [
        ("", Exception("The current node timed out"), "a local Ray did not start: The current node timed out; is the"),
        ("10.0.0.1:6379", ConnectionError("refused"), "Ray at 10.0.0.1:6379 could not be reached: refused; check res"),
    ],
)
def test_a_ray_that_does_not_come_up_is_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, address: str, raised: Exception, message: str
) -> None:
    def init(**options: object) -> None:
        raise raised

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    config = load(write_workspace(tmp_path))
    config.resources.ray_address = address
    with pytest.raises(ResourceError, match=message), ray_session(config, Console()):
        pass
