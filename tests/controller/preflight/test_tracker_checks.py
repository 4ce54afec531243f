import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb

from controller.config import Config
from controller.preflight.tracker_checks import check_trackers
from tests.refusals import refused
from workers.errors import ConfigError

KEY = "0123456789abcdef" * 3


def tracked(name: str) -> Config:
    config = Config()
    setattr(config.tracking, name, True)
    return config


@pytest.fixture
def wandb_without_a_key(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Iterator[pytest.MonkeyPatch]:
    """W&B as on a machine where nobody has logged in; it reads its variables once, unless it is torn down."""
    for name in (
        "WANDB_MODE",
        "WANDB_API_KEY",
        "WANDB_IDENTITY_TOKEN_FILE",
        "WANDB_BASE_URL",
    ):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    monkeypatch.setenv("WANDB_CONFIG_DIR", str(tmp_path / "config"))
    monkeypatch.chdir(tmp_path)
    wandb.teardown()
    yield monkeypatch
    wandb.teardown()


@pytest.mark.parametrize("name", ["tensorboard", "wandb", "mlflow"])
def test_a_tracker_that_is_not_installed_is_refused_with_what_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Not even where a folder has its name, as W&B makes one in the working directory."""
    (tmp_path / name).mkdir()
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, name, raising=False)
    config = tracked(name)
    config.tracking.tensorboard = name == "tensorboard"
    with refused(f"tracking.{name}"):
        check_trackers(config)
    setattr(config.tracking, name, False)
    check_trackers(config)


def test_wandb_without_a_key_is_refused(wandb_without_a_key: pytest.MonkeyPatch) -> None:
    with refused("WANDB_API_KEY"):
        check_trackers(tracked("wandb"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("WANDB_API_KEY", KEY),
        ("WANDB_MODE", "offline"),
        ("WANDB_MODE", "disabled"),
        ("WANDB_BASE_URL", "https://a.org"),
    ],
)
def test_wandb_with_a_key_a_login_or_without_a_server_is_taken(
    variable: str, value: str, wandb_without_a_key: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wandb_without_a_key.setenv(variable, value)
    (tmp_path / "netrc").write_text(f"machine a.org\n  login user\n  password {KEY}\n")
    check_trackers(tracked("wandb"))


@pytest.mark.parametrize(
    ("variable", "value"),
    [("WANDB_API_KEY", "short"), ("WANDB_MODE", "onlin"), ("WANDB_BASE_URL", "nowhere")],
)
def test_what_wandb_cannot_read_is_refused_in_one_line(
    variable: str, value: str, wandb_without_a_key: pytest.MonkeyPatch
) -> None:
    wandb_without_a_key.setenv(variable, value)
    with refused(f"tracking.wandb=true: {variable}"):
        check_trackers(tracked("wandb"))


ADDRESSES = [
    "127.0.0.1:5000",
    "localhost:5000",
    "http://",
    "http://:5000",
    "http://host:port",
    "http://host:99999",
    "http://[::1",
    "htp://host:5000",
    "mlruns",
    "sqlite:///mlflow.db",  # the package for databases is not among those of the tests
]


@pytest.mark.parametrize("address", ["", *ADDRESSES])
def test_an_address_that_mlflow_cannot_read_is_refused(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with refused(f"MLFLOW_TRACKING_URI={address}" if address else "MLFLOW_TRACKING_URI"):
        check_trackers(tracked("mlflow"))


@pytest.mark.parametrize(
    "address",
    [
        "http://127.0.0.1:5000",
        "https://user:word@mlflow.example.org/path",
        "databricks",
        "databricks://profile",
    ],
)
def test_an_address_that_mlflow_can_read_is_taken(
    address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    check_trackers(tracked("mlflow"))


def test_a_password_in_an_address_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@host:99999")
    with pytest.raises(ConfigError) as refusal:
        check_trackers(tracked("mlflow"))
    assert "...@host:99999" in str(refusal.value) and "secret" not in str(refusal.value)


@pytest.mark.parametrize("name", ["wandb", "mlflow"])
def test_a_described_cluster_needs_no_key_or_address_here(
    name: str, wandb_without_a_key: pytest.MonkeyPatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    config = tracked(name)
    config.is_described = True
    check_trackers(config)
