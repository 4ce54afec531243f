import sys
from pathlib import Path

import pytest

from controller.config import Config
from controller.tracker_checks import check_trackers
from workers.errors import ConfigError


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_with_what_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Shadowed by no folder of that name: the package is searched for where only the standard library is."""
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    config = Config()
    check_trackers(config)
    setattr(config.tracking, name, True)
    with pytest.raises(ConfigError, match=rf"needs the package {name}.*pip install -e \.\[{name}\]"):
        check_trackers(config)


def test_mlflow_without_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = Config()
    config.tracking.mlflow = True
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        check_trackers(config)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:5000")
    check_trackers(config)
