"""Check that the run's trackers are installed and configured. No server is contacted."""

import os
import re
from importlib.metadata import entry_points
from importlib.util import find_spec
from pathlib import Path
from urllib.parse import urlsplit

from controller.config import TrainingConfig
from workers.errors import ConfigError, Problems

INSTALL = {
    "tensorboard": "pip install tensorboard",
    "wandb": "pip install -e .[wandb]",
    "mlflow": "pip install -e .[mlflow]",
    "swanlab": "pip install -e .[swanlab]",
    "trackio": "pip install -e .[trackio]",
}


def check_trackers(config: TrainingConfig) -> None:
    if config.is_described:
        return  # packages, keys and variables of another machine
    problems = Problems()
    for name, command in INSTALL.items():
        with problems.collecting():
            if getattr(config.tracking, name):
                _check_tracker(name, command)
    problems.raise_all()


def _check_tracker(name: str, command: str) -> None:
    if not _is_installed(name):
        raise ConfigError(
            f"tracking.{name}=true needs the package {name}, which is not installed. `{command}` does it, "
            f"or set tracking.{name}=false."
        )
    if name == "wandb":
        _check_wandb()
    if name == "swanlab":
        _check_swanlab()
    if name == "mlflow":
        _check_mlflow(os.environ.get("MLFLOW_TRACKING_URI", ""))


def _is_installed(package: str) -> bool:
    spec = find_spec(package)
    # A folder, such as W&B's ./wandb, has no origin.
    return spec is not None and spec.origin is not None


def _check_wandb() -> None:
    """Let W&B find its key, because it reads variables, settings files and netrc."""
    import wandb
    from pydantic import ValidationError
    from wandb.sdk import wandb_setup
    from wandb.sdk.lib import wbauth

    try:
        settings = wandb_setup.singleton().settings  # `wandb.setup()` would start a process
        if settings.mode in ("offline", "dryrun", "disabled"):
            return
        host = settings.base_url
        key = wbauth.authenticate_session(
            host=host, source="ballast", prompt=False, update_session=False
        )
    except wandb.Error as error:
        raise ConfigError(f"tracking.wandb=true: {error}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        variable = "_".join(["WANDB", *map(str, problem["loc"])]).upper()
        raise ConfigError(f"tracking.wandb=true: {variable}: {problem['msg']}.") from None
    if key is None:
        raise ConfigError(
            f"tracking.wandb=true needs a key for {host}: set WANDB_API_KEY or run `wandb login`. "
            "WANDB_MODE=offline needs neither key nor network."
        )


KEYLESS_MODES = ("offline", "local", "disabled")


def _check_swanlab() -> None:
    """Look for SwanLab's key where it does: the variable, and the file that `swanlab login` writes."""
    mode = os.environ.get("SWANLAB_MODE", "")
    folder = (
        os.environ.get("SWANLAB_ROOT")
        or os.environ.get("SWANLAB_SAVE_DIR")
        or Path.home() / ".swanlab"
    )
    if (
        mode in KEYLESS_MODES
        or os.environ.get("SWANLAB_API_KEY")
        or Path(folder, ".netrc").is_file()
    ):
        return
    raise ConfigError(
        "tracking.swanlab=true needs a key: set SWANLAB_API_KEY or run `swanlab login`. "
        "SWANLAB_MODE=offline needs neither key nor network."
    )


DATABASES = ("postgresql", "mysql", "sqlite", "mssql")
SERVICES = ("databricks", "uc")


def _check_mlflow(address: str) -> None:
    """Read the address as MLflow does, whose import would take seconds."""
    if not address:
        raise ConfigError(
            "tracking.mlflow=true needs the environment variable MLFLOW_TRACKING_URI, the address of an "
            "MLflow server."
        )
    if wrong := _wrong_with(address):
        safe_address = re.sub(r"//.*@", "//...@", address)  # it may hold a password
        raise ConfigError(
            f"tracking.mlflow=true: MLFLOW_TRACKING_URI={safe_address} {wrong}."
        )


def _wrong_with(address: str) -> str:
    try:
        parts = urlsplit(address)
        port = parts.port
    except ValueError:  # unclosed brackets, or an invalid port
        return "is not an address, such as http://HOST:PORT"
    # With a database also the driver, as in mysql+pymysql.
    scheme = parts.scheme.partition("+")[0]
    if "/" not in address and address.rpartition(":")[2].isdigit():
        return "names no protocol. Put http:// before it"
    if scheme in ("http", "https"):
        return (
            ""
            if parts.hostname and port != 0 and " " not in address
            else "names no host, as in http://HOST:PORT"
        )
    if {scheme, address} & {*SERVICES, *entry_points(group="mlflow.tracking_store").names}:
        return ""
    if scheme in DATABASES:
        return (
            ""
            if _is_installed("sqlalchemy")
            else "is a database, which needs `pip install mlflow`"
        )
    if scheme in ("", "file"):
        allowed = os.environ.get("MLFLOW_ALLOW_FILE_STORE", "").lower() in ("true", "1")
        return (
            ""
            if allowed
            else "is a folder, which MLflow takes with MLFLOW_ALLOW_FILE_STORE=true alone"
        )
    return "is of no kind that MLflow knows, such as http://HOST:PORT"
