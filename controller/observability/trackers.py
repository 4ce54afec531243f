"""Trackers: services that receive a run's metrics. `open_trackers` opens the requested ones.

    a step's metrics --> Tracker.log of each: Ray (Prometheus) | TensorBoard | Weights & Biases | MLflow |
    some samples --> Tracker.table of all but Ray's                      SwanLab, Trackio (local_trackers.py)

No failure of a service stops a run (`GuardedTracker`). Keys and addresses come from the services' environment
variables (WANDB_*, MLFLOW_*), never from the configuration, which is written to the run's folder.
"""

import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from controller.config import TrainingConfig
from controller.config.file import settings, value_of
from controller.observability.local_trackers import SwanLabTracker, TrackioTracker
from controller.observability.ray_metrics import RayMetrics
from controller.observability.run_folder import Tracker, writing
from controller.observability.tracker_tables import markdown, tabular
from workers.errors import ConfigError, one_line


class RayTracker(Tracker):
    """Exports to Prometheus, in about a millisecond a step."""

    def __init__(self, metrics: RayMetrics) -> None:
        self._metrics = metrics

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in {
            "run/step": step,
            "run/steps": float(step > 0),
            **metrics,
        }.items():
            self._metrics.export(name, value)


class TensorBoardTracker(Tracker):
    def __init__(self, folder: Path, *, last_step: int = 0) -> None:
        """last_step: step to resume from. TensorBoard hides later records."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(
                str(folder), purge_step=last_step + 1 if last_step else None
            )

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with writing(self._folder):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write a table in the tab TEXT."""
        with writing(self._folder):
            self._writer.add_text(name, markdown(rows), step)

    def close(self, *, succeeded: bool) -> None:
        del succeeded
        with writing(self._folder):
            self._writer.close()


class WandbTracker(Tracker):
    """A run in Weights & Biases, named by `id`. WANDB_MODE=offline writes to `folder`/wandb, for `wandb
    sync`.
    """

    def __init__(
        self,
        folder: Path,
        project: str,
        name: str,
        config_values: Mapping[str, Any],
        id: str = "",
    ) -> None:
        """id: of the run to resume, or empty. Raises ConfigError if W&B cannot start."""
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=id or None,
                resume="allow",
                dir=str(folder),
                config=dict(config_values),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(
                f"tracking.wandb: {error}. WANDB_MODE=offline needs neither key nor network."
            ) from error
        self.id = str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step. W&B drops a step that it already has."""
        self._run.log(dict(metrics), step=step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a new table per step, under one name."""
        import wandb

        table = tabular(rows)
        wandb_table = wandb.Table(
            columns=table["columns"], data=table["data"], allow_mixed_types=True
        )
        self._run.log({name: wandb_table}, step=step)

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


METRICS_A_CALL, PARAMETERS_A_CALL = 1000, 100  # limits of MLflow
LONGEST_PARAMETER = 6000  # characters
MLFLOW_DEFAULTS = {
    # The next step tries again anyway: MLflow's own seven tries would hold up a step for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables, unless set."""


class MlflowTracker(Tracker):
    """A run in MLflow, at MLFLOW_TRACKING_URI, named by `id`."""

    def __init__(
        self,
        project: str,
        name: str,
        config_values: Mapping[str, Any],
        log: Callable[[str], None],
        id: str = "",
    ) -> None:
        """config_values: parameters of a new run. log: prints a line. id: of the run to resume, or
        empty.

        Raises ConfigError if MLflow does not answer or does not know the run.
        """
        for variable, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._failure = MlflowException
        self._client = MlflowClient()
        self._log = log
        self._waiting = list[Any]()
        try:
            self.id = id or self._begin(project, name, config_values)
            self._client.update_run(self.id, status="RUNNING")
        except MlflowException as error:
            raise ConfigError(
                f"tracking.mlflow: {_first_line(error)}. Check MLFLOW_TRACKING_URI."
            ) from error

    def _begin(self, project: str, name: str, config_values: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(project)
        number = (
            experiment.experiment_id
            if experiment
            else self._client.create_experiment(project)
        )
        run = self._client.create_run(number, run_name=name).info.run_id
        parameters = [
            Param(key, str(value)[:LONGEST_PARAMETER])
            for key, value in config_values.items()
        ]
        for first in range(0, len(parameters), PARAMETERS_A_CALL):
            self._client.log_batch(
                run, params=parameters[first : first + PARAMETERS_A_CALL]
            )
        return str(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue metrics while the server is unreachable. The next step retries."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [
            Metric(name.replace("@", "_at_"), value, now, step)
            for name, value in metrics.items()
        ]
        try:
            self._send()
        except self._failure as error:
            self._log(
                f"MLflow: {_first_line(error)}. {len(self._waiting)} metrics wait for the next step"
            )

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write an artifact, `samples/step-7.json`, which MLflow shows as a table."""
        try:
            self._client.log_dict(self.id, tabular(rows), f"{name}/step-{step}.json")
        except (self._failure, OSError) as error:
            self._log(
                f"MLflow: {_first_line(error)}. The table {name} of step {step} is only in the run's folder"
            )

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self.id, metrics=self._waiting[:METRICS_A_CALL])
            del self._waiting[:METRICS_A_CALL]

    def close(self, *, succeeded: bool) -> None:
        try:
            self._send()
            self._client.set_terminated(self.id, "FINISHED" if succeeded else "FAILED")
        except self._failure as error:
            self._log(
                f"MLflow: {_first_line(error)}. {len(self._waiting)} metrics are only in metrics.jsonl"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0].rstrip(".")


class GuardedTracker(Tracker):
    """Prints a line for a tracker's first failure, and counts the others: the run's own files have what it
    misses.
    """

    def __init__(self, tracker: Tracker, service: str, log: Callable[[str], None]) -> None:
        self._tracker = tracker
        self._service = service
        self._log = log
        self._failures = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with self._guarding(f"metrics of step {step}"):
            self._tracker.log(step, metrics)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        with self._guarding(f"{name} of step {step}"):
            self._tracker.table(name, step, rows)

    def close(self, *, succeeded: bool) -> None:
        with self._guarding("the end of the run"):
            self._tracker.close(succeeded=succeeded)
        if self._failures > 1:
            self._log(
                f"{self._service}: {self._failures} records failed. The run's folder has them"
            )

    @contextmanager
    def _guarding(self, missed: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # services raise errors of every type
            self._failures += 1
            if self._failures == 1:
                reason = one_line(error).rstrip(".")
                self._log(
                    f"{self._service}: {reason}. It misses {missed}, which the run's folder has"
                )


def open_trackers(
    config: TrainingConfig,
    resumed_ids: Mapping[str, str],
    last_step: int,
    log: Callable[[str], None],
    exported: RayMetrics,
) -> tuple[list[Tracker], dict[str, str]]:
    """Open Ray's metrics and the trackers of tracking.*. Also return the run's id in each service.

    resumed_ids: ids of the resumed run, used only under its own name. last_step: last recorded step. Raises
    ConfigError if a service refuses the run.
    """
    folder = config.run_folder
    tracking = config.tracking
    folder.mkdir(parents=True, exist_ok=True)
    trackers: dict[str, Tracker] = {"Ray's metrics": RayTracker(exported)}
    if tracking.tensorboard:
        trackers["TensorBoard"] = TensorBoardTracker(
            folder / "tensorboard", last_step=last_step
        )
    resumed_ids = resumed_ids if config.run.resume == "auto" else {}
    run = (
        tracking.project,
        config.run.name,
        {setting.key: value_of(config, setting.key) for setting in settings(config)},
    )
    ids: dict[str, str] = {}
    if tracking.wandb:
        wandb = WandbTracker(folder, *run, id=resumed_ids.get("wandb", ""))
        trackers["W&B"] = wandb
        ids["wandb"] = wandb.id
    if tracking.mlflow:
        mlflow = MlflowTracker(*run, log, id=resumed_ids.get("mlflow", ""))
        trackers["MLflow"] = mlflow
        ids["mlflow"] = mlflow.id
    if tracking.swanlab:
        swanlab = SwanLabTracker(folder, *run, id=resumed_ids.get("swanlab", ""))
        trackers["SwanLab"] = swanlab
        ids["swanlab"] = swanlab.id
    if tracking.trackio:
        trackio = TrackioTracker(*run, id=resumed_ids.get("trackio", ""))
        trackers["Trackio"] = trackio
        ids["trackio"] = trackio.id
    return [GuardedTracker(tracker, name, log) for name, tracker in trackers.items()], ids
