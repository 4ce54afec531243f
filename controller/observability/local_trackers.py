"""Trackers that need no server: SwanLab (offline, or its cloud) and Trackio (a database on this machine).

    Tracker.log, .table --> SwanLab: a folder for `swanlab sync`, or its cloud
                        --> Trackio: `trackio show --project NAME`

Both print about themselves, which does not reach the terminal. Both raise errors of many types, which
`GuardedTracker` catches.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

from controller.observability.recorded_values import finite
from controller.observability.run_folder import Tracker
from controller.observability.tracker_tables import markdown, tabular
from workers.errors import ConfigError, one_line


class SwanLabTracker(Tracker):
    """A run in SwanLab, named by `id`. SWANLAB_MODE=offline writes to `folder`/swanlab, for `swanlab
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
        """id: of the run to resume, or empty. Raises ConfigError if SwanLab cannot start."""
        import swanlab

        self._text = swanlab.Text
        with _starting("swanlab", "SWANLAB_MODE=offline needs neither key nor network"):
            self._run = swanlab.init(
                project=project,
                name=name,
                id=id or None,
                resume="allow",
                log_dir=str(folder / "swanlab"),
                config=dict(config_values),
            )
        self.id = str(self._run.id)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with _silent():
            self._run.log(dict(metrics), step=step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Log the rows as text, a Markdown table: SwanLab's tables hold no mixed types."""
        with _silent():
            self._run.log({name: self._text(markdown(rows))}, step=step)

    def close(self, *, succeeded: bool) -> None:
        with _silent():
            self._run.finish(
                state="success" if succeeded else "crashed",
                error=None if succeeded else "failed",
            )


class TrackioTracker(Tracker):
    """A run in Trackio, named by `id`, in TRACKIO_DIR or the hub's cache folder."""

    def __init__(
        self,
        project: str,
        name: str,
        config_values: Mapping[str, Any],
        id: str = "",
    ) -> None:
        """id: name of the run to resume, or empty. Raises ConfigError if Trackio cannot start."""
        import trackio

        self._table = trackio.Table
        self._finish = trackio.finish
        with _starting("trackio", "Check TRACKIO_DIR"):
            self._run = trackio.init(
                project=project,
                name=id or name,
                resume="allow" if id else "never",
                config=dict(config_values),
                embed=False,
                auto_log_gpu=False,
                auto_log_cpu=False,
            )
        self.id = str(self._run.name)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Log a step. Trackio keeps numbers in JSON, which has no NaN: such values are null."""
        with _silent():
            self._run.log(
                {name: finite(value) for name, value in metrics.items()}, step=step
            )

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        table = tabular(rows)
        with _silent():
            trackio_table = self._table(
                columns=table["columns"], data=table["data"], allow_mixed_types=True
            )
            self._run.log({name: trackio_table}, step=step)

    def close(self, *, succeeded: bool) -> None:
        """End the run. Trackio has no state for a run that failed: a metric says so."""
        with _silent():
            self._run.log({"run/succeeded": float(succeeded)})
            self._finish()  # the run's own would leave it open for Trackio's end of the process


@contextmanager
def _starting(name: str, fix: str) -> Iterator[None]:
    try:
        with _silent():
            yield
    except Exception as error:
        raise ConfigError(
            f"tracking.{name}: {one_line(error).rstrip('.')}. {fix}."
        ) from error


@contextmanager
def _silent() -> Iterator[None]:
    with redirect_stdout(StringIO()):
        yield
