"""Whether the trackers that a run asks for can be there; checked before anything starts, and without importing them."""

import os
from importlib.util import find_spec

from controller.config import Config
from workers.errors import ConfigError


def check_trackers(config: Config) -> None:
    """Raise ConfigError, naming what to install or to set, at the first tracker that cannot be used."""
    for name in ("wandb", "mlflow"):
        if getattr(config.tracking, name) and find_spec(name) is None:
            raise ConfigError(
                f"tracking.{name}=true needs the package {name}, which is not installed; "
                f"`pip install -e .[{name}]` does it, or remove tracking.{name}."
            )
    if config.tracking.mlflow and not os.environ.get("MLFLOW_TRACKING_URI"):
        raise ConfigError(
            "tracking.mlflow=true needs the environment variable MLFLOW_TRACKING_URI, the address of an MLflow server."
        )
