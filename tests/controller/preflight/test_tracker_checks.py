import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb

from controller.config import Config
from controller.preflight.tracker_checks import check_trackers
from workers.errors import ConfigError

KEY = "0123456789abcdef" * 3


def tracked(name: str) -> Config:
    config = Config()
    setattr(config.tracking, name, True)
    return config


@pytest.fixture
def wandb_without_a_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[pytest.MonkeyPatch]:
    """W&B as on a machine where nobody has logged in; it reads its variables once, unless it is torn down."""
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_IDENTITY_TOKEN_FILE", "WANDB_BASE_URL"):
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
    with pytest.raises(ConfigError, match=rf"needs the package {name}.*`pip install .*{name}.*`"):
        check_trackers(config)
    setattr(config.tracking, name, False)
    check_trackers(config)


def test_wandb_without_a_key_is_refused(wandb_without_a_key: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"needs a key for https://.*: set WANDB_API_KEY or run `wandb login`"):
        check_trackers(tracked("wandb"))


@pytest.mark.parametrize(
    ("variable", "value"), [("WANDB_API_KEY", KEY), ("WANDB_MODE", "offline"), ("WANDB_MODE", "disabled")]
)
def test_wandb_with_a_key_or_without_a_server_is_taken(
    variable: str, value: str, wandb_without_a_key: pytest.MonkeyPatch
) -> None:
    wandb_without_a_key.setenv(variable, value)
    check_trackers(tracked("wandb"))


def test_a_wandb_login_of_this_machine_is_found(wandb_without_a_key: pytest.MonkeyPatch, tmp_path: Path) -> None:
    wandb_without_a_key.setenv("WANDB_BASE_URL", "https://wandb.example.org")
    (tmp_path / "netrc").write_text(f"machine wandb.example.org\n  login user\n  password {KEY}\n")
    check_trackers(tracked("wandb"))


@pytest.mark.parametrize(
    ("variable", "value", "message"),
    [
        ("WANDB_API_KEY", "short", r"^tracking.wandb=true: WANDB_API_KEY invalid: .*40\+ characters"),
        ("WANDB_MODE", "onlin", r"^tracking.wandb=true: WANDB_MODE: Input should be 'online', 'offline'"),
        ("WANDB_BASE_URL", "nowhere", r"^tracking.wandb=true: WANDB_BASE_URL: Input should be a valid URL"),
    ],
)
def test_what_wandb_cannot_read_is_refused_in_one_line(
    variable: str, value: str, message: str, wandb_without_a_key: pytest.MonkeyPatch
) -> None:
    wandb_without_a_key.setenv(variable, value)
    with pytest.raises(ConfigError, match=message) as refusal:
        check_trackers(tracked("wandb"))
    assert "\n" not in str(refusal.value)


def test_mlflow_without_a_server_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    with pytest.raises(ConfigError, match="MLFLOW_TRACKING_URI"):
        check_trackers(tracked("mlflow"))


@pytest.mark.parametrize(
    "address",
    ["http://127.0.0.1:5000", "https://user:word@mlflow.example.org/path", "databricks", "databricks://profile"],
)
def test_an_address_that_mlflow_can_read_is_taken(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    check_trackers(tracked("mlflow"))


@pytest.mark.parametrize(
    ("address", "wrong"),
    [
        ("127.0.0.1:5000", "names no protocol; put http:// before it"),
        ("localhost:5000", "names no protocol; put http:// before it"),
        ("http://", "names no host"),
        ("http://:5000", "names no host"),
        ("http://host:port", "is not an address"),
        ("http://host:99999", "is not an address"),
        ("http://[::1", "is not an address"),
        ("htp://host:5000", "is of no kind that MLflow knows"),
        ("mlruns", "is a folder, which MLflow takes with MLFLOW_ALLOW_FILE_STORE=true alone"),
        ("sqlite:///mlflow.db", "is a database, which needs `pip install mlflow`"),
    ],
)
def test_an_address_that_mlflow_cannot_read_is_refused(
    address: str, wrong: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Databases: the package for them is not among those of the tests."""
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    monkeypatch.delenv("MLFLOW_ALLOW_FILE_STORE", raising=False)
    with pytest.raises(ConfigError, match=re.escape(f"MLFLOW_TRACKING_URI={address} {wrong}")):
        check_trackers(tracked("mlflow"))


def test_a_password_in_an_address_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:secret@host:99999")
    with pytest.raises(ConfigError, match=r"http://\.\.\.@host:99999") as refusal:
        check_trackers(tracked("mlflow"))
    assert "secret" not in str(refusal.value)
