"""Trackers: services that receive a run's metrics; `open_trackers` opens the requested ones.

    a step's metrics --> Tracker.log of each: TensorBoard | Weights & Biases | MLflow | Ray (Prometheus)
    some samples --> Tracker.table of each:   TensorBoard | Weights & Biases | MLflow

An unreachable service does not stop a run; missing metrics are logged at the end. Keys and addresses come from the
services' environment variables (WANDB_*, MLFLOW_*), never from the configuration, which is written to the run's folder.
"""

import json
import os
import time
from collections.abc import Callable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, Protocol

from controller.config import TrainingConfig
from controller.config.file import settings, value_of
from controller.observability.ray_metrics import RayMetrics, RayTracker
from controller.observability.run_folder import finite, writing
from workers.errors import ConfigError


class Tracker(Protocol):
    """A service that receives metrics."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics (from 1; 0 is the validation before training)."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show `rows`, texts and numbers by column, as the step's table `name`, if supported."""

    def close(self, *, succeeded: bool) -> None:
        """Write what is pending, and report how the run ended."""


class TensorBoardTracker:
    """TensorBoard events."""

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        """after: step to resume from; TensorBoard hides later records."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder), purge_step=after + 1 if after else None)

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


class WandbTracker:
    """A run in Weights & Biases, named by `id`. WANDB_MODE=offline writes to `folder`/wandb, for `wandb sync`."""

    def __init__(self, folder: Path, project: str, name: str, shown: Mapping[str, Any], id: str = "") -> None:
        """shown: settings. id: of the run to resume; empty starts one.

        Raises ConfigError if W&B cannot start: no key, project or connection.
        """
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=id or None,
                resume="allow",
                dir=str(folder),
                config=dict(shown),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(f"tracking.wandb: {error}; WANDB_MODE=offline needs neither key nor network.") from error
        self.id = str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """W&B drops steps that it has already, which a resumed run repeats."""
        self._run.log(dict(metrics), step=step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log a new table per step, under one name."""
        import wandb

        names = columns_of(rows)
        data = [[cell(row.get(column)) for column in names] for row in rows]
        self._run.log({name: wandb.Table(columns=list[Any](names), data=data, allow_mixed_types=True)}, step=step)

    def close(self, *, succeeded: bool) -> None:
        self._run.finish(exit_code=0 if succeeded else 1)


MOST_IN_A_BATCH = 1000
"""Metrics that MLflow takes in one call, and 100 parameters."""
LONGEST_PARAMETER = 6000
"""Characters."""
MLFLOW_DEFAULTS = {
    # The next step tries again anyway: MLflow's own seven tries would hold up a step for minutes.
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "10",
    "MLFLOW_DISABLE_TELEMETRY": "true",
}
"""Environment variables, where they are not set."""


class MlflowTracker:
    """A run in MLflow, at MLFLOW_TRACKING_URI, named by `id`."""

    def __init__(
        self, project: str, name: str, shown: Mapping[str, Any], log: Callable[[str], None], id: str = ""
    ) -> None:
        """shown: settings, as parameters of a new run. log: prints a line. id: of the run to resume; empty starts one.

        Raises ConfigError if MLflow does not answer or does not know the run.
        """
        for variable, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._failure, self._client = MlflowException, MlflowClient()
        self._log, self._waiting = log, list[Any]()
        try:
            self.id = id or self._begin(project, name, shown)
            self._client.update_run(self.id, status="RUNNING")
        except MlflowException as error:
            raise ConfigError(f"tracking.mlflow: {_first_line(error)}; check MLFLOW_TRACKING_URI.") from error

    def _begin(self, project: str, name: str, shown: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        run = self._client.create_run(number, run_name=name).info.run_id
        parameters = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in shown.items()]
        for first in range(0, len(parameters), 100):
            self._client.log_batch(run, params=parameters[first : first + 100])
        return str(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Queue metrics while the server is unreachable; the next step retries."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(name.replace("@", "_at_"), value, now, step) for name, value in metrics.items()]
        try:
            self._send()
        except self._failure as error:
            self._log(f"MLflow: {_first_line(error)}; {len(self._waiting)} metrics wait for the next step")

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Write an artifact, `samples/step-7.json`, which MLflow shows as a table."""
        names = columns_of(rows)
        data = {"columns": names, "data": [[cell(row.get(column)) for column in names] for row in rows]}
        try:
            self._client.log_dict(self.id, data, f"{name}/step-{step}.json")
        except (self._failure, OSError) as error:
            self._log(f"MLflow: {_first_line(error)}; the table {name} of step {step} is in the run's folder alone")

    def _send(self) -> None:
        while self._waiting:
            self._client.log_batch(self.id, metrics=self._waiting[:MOST_IN_A_BATCH])
            del self._waiting[:MOST_IN_A_BATCH]

    def close(self, *, succeeded: bool) -> None:
        try:
            self._send()
            self._client.set_terminated(self.id, "FINISHED" if succeeded else "FAILED")
        except self._failure as error:
            self._log(
                f"MLflow: {_first_line(error)}; {len(self._waiting)} metrics are not there, metrics.jsonl has them all"
            )


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0]


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Collect the columns of rows, some of which may lack some."""
    return list(dict.fromkeys(name for row in rows for name in row))


def cell(value: Any) -> Any:
    """Convert a value to a number or a text for a table; lists and mappings become JSON."""
    if isinstance(value, float):
        return finite(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as a Markdown table, with HTML escaped."""
    names = columns_of(rows)
    lines = [names, ["---"] * len(names), *([_in_markdown(row.get(name, "")) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _in_markdown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(cell(value))
    return escape(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


def open_trackers(
    config: TrainingConfig, known: Mapping[str, str], after: int, log: Callable[[str], None], exported: RayMetrics
) -> tuple[list[Tracker], dict[str, str]]:
    """Open Ray's metrics and the trackers of tracking.*; also return the run's id in each service.

    known: ids of the resumed run, which its trackers continue; a new run name starts new ones. after: last recorded
    step. Raises ConfigError if a service refuses the run.
    """
    folder, tracking = config.run_folder, config.tracking
    folder.mkdir(parents=True, exist_ok=True)
    known = known if config.run.resume == "auto" else {}
    ids: dict[str, str] = {}
    trackers: list[Tracker] = [RayTracker(exported)]
    if tracking.tensorboard:
        trackers.append(TensorBoardTracker(folder / "tensorboard", after=after))
    flat = {found.key: value_of(config, found.key) for found in settings(config)}
    shared = (tracking.project, config.run.name, flat)
    if tracking.wandb:
        wandb = WandbTracker(folder, *shared, id=known.get("wandb", ""))
        trackers.append(wandb)
        ids["wandb"] = wandb.id
    if tracking.mlflow:
        mlflow = MlflowTracker(*shared, log, id=known.get("mlflow", ""))
        trackers.append(mlflow)
        ids["mlflow"] = mlflow.id
    return trackers, ids
