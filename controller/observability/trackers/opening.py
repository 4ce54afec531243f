"""Opens the trackers of a run, at the step that it resumes from."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from controller.config import TrainingConfig
from controller.config.file import settings, value_of
from controller.observability.trackers import Tracker
from controller.observability.trackers.files import JsonLinesTracker, TensorBoardTracker
from controller.observability.trackers.ray_metrics import RayMetrics, RayTracker
from controller.observability.trackers.services import MlflowTracker, WandbTracker

if TYPE_CHECKING:
    from controller.checkpoint import Progress


def open_trackers(
    config: TrainingConfig, progress: "Progress", log: Callable[[str], None], exported: RayMetrics
) -> list[Tracker]:
    """metrics.jsonl, Ray and the trackers of tracking.*.

    Ids of the run in services go into `progress.trackers`, for the next resume.

    A run that resumes under its own name resumes in its trackers; under a new name it is a new run there too. Raises
    ConfigError if a service does not take the run.
    """
    folder, tracking = config.run_folder, config.tracking
    folder.mkdir(parents=True, exist_ok=True)
    known = progress.trackers if config.run.resume == "auto" else {}
    progress.trackers = {}
    trackers: list[Tracker] = [JsonLinesTracker(folder / "metrics.jsonl", after=progress.step)]
    trackers.append(RayTracker(exported))
    if tracking.tensorboard:
        trackers.append(TensorBoardTracker(folder / "tensorboard", after=progress.step))
    shared = (tracking.project, config.run.name, _flat(config))
    if tracking.wandb:
        wandb = WandbTracker(folder, *shared, id=known.get("wandb", ""))
        trackers.append(wandb)
        progress.trackers["wandb"] = wandb.id
    if tracking.mlflow:
        mlflow = MlflowTracker(*shared, log, id=known.get("mlflow", ""))
        trackers.append(mlflow)
        progress.trackers["mlflow"] = mlflow.id
    return trackers


def _flat(config: TrainingConfig) -> dict[str, Any]:
    """Every setting by its key."""
    return {found.key: value_of(config, found.key) for found in settings(config)}
