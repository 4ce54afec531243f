"""Trackers of other makers: Weights & Biases and MLflow. Imported only where a run asks for them.

Keys and addresses come from their own environment variables (WANDB_*, MLFLOW_*), never from the configuration, which
is written to the run's folder and to the tracker.
"""

import os
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from controller.observability.trackers.files import cell, columns_of
from workers.errors import ConfigError


class WandbTracker:
    """A run in Weights & Biases; `id` names it. WANDB_MODE=offline writes to `folder`/wandb, for `wandb sync`."""

    def __init__(self, folder: Path, project: str, name: str, settings: Mapping[str, Any], id: str = "") -> None:
        """`settings`: shown beside the run. `id`: of the run to resume; empty begins one.

        Raises ConfigError if W&B cannot begin it: no key, no such project, no connection.
        """
        import wandb

        try:
            self._run = wandb.init(
                project=project,
                name=name,
                id=id or None,
                resume="allow",
                dir=str(folder),
                config=dict(settings),
                settings=wandb.Settings(silent=True, console="off"),
            )
        except wandb.Error as error:
            raise ConfigError(f"tracking.wandb: {error}; WANDB_MODE=offline needs neither key nor network.") from error
        self.id = str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """W&B leaves out steps that it has already: those that a resumed run repeats."""
        self._run.log(dict(metrics), step=step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of its own for every step, under one name."""
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
    """A run in MLflow, at MLFLOW_TRACKING_URI; `id` names it."""

    def __init__(
        self, project: str, name: str, settings: Mapping[str, Any], log: Callable[[str], None], id: str = ""
    ) -> None:
        """`settings`: a new run's parameters. `log`: shows a line. `id`: of the run to resume; empty begins one.

        Raises ConfigError if MLflow does not answer or does not know the run.
        """
        for variable, value in MLFLOW_DEFAULTS.items():
            os.environ.setdefault(variable, value)
        from mlflow.exceptions import MlflowException
        from mlflow.tracking import MlflowClient

        self._failure, self._client = MlflowException, MlflowClient()
        self._log, self._waiting = log, list[Any]()
        try:
            self.id = id or self._begin(project, name, settings)
            self._client.update_run(self.id, status="RUNNING")
        except MlflowException as error:
            raise ConfigError(f"tracking.mlflow: {_first_line(error)}; check MLFLOW_TRACKING_URI.") from error

    def _begin(self, project: str, name: str, settings: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        experiment = self._client.get_experiment_by_name(project)
        number = experiment.experiment_id if experiment else self._client.create_experiment(project)
        run = self._client.create_run(number, run_name=name).info.run_id
        parameters = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in settings.items()]
        for first in range(0, len(parameters), 100):
            self._client.log_batch(run, params=parameters[first : first + 100])
        return str(run)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """While the server is away metrics wait here; the next step tries again."""
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        self._waiting += [Metric(name.replace("@", "_at_"), value, now, step) for name, value in metrics.items()]
        try:
            self._send()
        except self._failure as error:
            self._log(f"MLflow: {_first_line(error)}; {len(self._waiting)} metrics wait for the next step")

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """An artifact, `samples/step-7.json`, which MLflow shows as a table."""
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
