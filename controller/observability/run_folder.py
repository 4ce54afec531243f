"""A run's files: helpers to write them (`metrics.RunWriter`), and `RunFolder`, which reads them.

runs/NAME/   config.yaml  run.log  metrics.jsonl  lengths.jsonl  samples.jsonl  timeline.jsonl  validation/step-N.jsonl
             samples/step-N.npz, of which `controller.rollout.sample_files` knows the content
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from balancing.analysis.lengths_file import check_lengths, has_step, json_records
from workers.errors import DataError, OutputError

Row = dict[str, Any]
LARGEST = 1e100
"""From here on, axes overflow."""
LOG = "run.log"
"""File of what a run has said."""


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write (a full disk) in the block into an OutputError that names `path`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} could not be written: {error.strerror or error}; make room, or set run.dir to another disk."
        ) from error


class JsonLines:
    """A file of JSON lines, each flushed, so that a killed run loses nothing. Raises OutputError."""

    def __init__(self, path: Path, *, after: int = 0) -> None:
        """after: step to resume from; later and damaged lines are removed. 0 keeps nothing."""
        self.path = path
        with writing(path):
            found = json_records(path, has_step) if after and path.exists() else ()
            path.write_bytes(b"".join(line.rstrip(b"\n") + b"\n" for line, row in found if row["step"] <= after))
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any], **options: Any) -> None:
        """Append one record; options: of `json.dumps`."""
        with writing(self.path):
            self._file.write(json.dumps(record, **options) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self.path):
            self._file.close()


def finite(value: float) -> float | None:
    """Return `value`, or None if JSON has no number for it."""
    return value if math.isfinite(value) else None


def step_file(folder: Path, step: int) -> Path:
    """Return the file of a step's samples, kept with run.record_samples."""
    return folder / "samples" / f"step-{step}.npz"


def recorded_steps(folder: Path) -> list[int]:
    """List the steps with kept samples, in order."""
    files = step_file(folder, 0).parent.glob("step-*.npz")
    return sorted(int(file.stem.removeprefix("step-")) for file in files if file.stem[5:].isdecimal())


@dataclass(frozen=True)
class Curve:
    """One metric over the steps that have it."""

    steps: list[int]
    values: list[float]


@dataclass(frozen=True)
class RunFolder:
    """Reads a run's files. Missing ones count as empty; damaged lines are skipped with a warning."""

    path: Path

    @cached_property
    def metrics(self) -> list[Row]:
        """A row per step. Raises DataError without any, because the folder is then not a run's."""
        rows = self._rows("metrics.jsonl", has_step, lambda row: _check_numbers(row, *row))
        if not rows:
            raise DataError(f"{self.path / 'metrics.jsonl'} holds no step; give the folder of a run that has made one.")
        return rows

    @cached_property
    def lengths(self) -> dict[int, list[int]]:
        """Lengths of every step's sequences, in batch order."""
        return {row["step"]: row["lengths"] for row in self._rows("lengths.jsonl", has_step, check_lengths)}

    @cached_property
    def samples(self) -> list[Row]:
        """Some samples of every step; see `Rollout.examples`."""
        numbers = ("sample", "response_tokens", "seconds", "reward")
        return self._rows("samples.jsonl", has_step, lambda row: _check_numbers(row, *numbers))

    @property
    def finished_steps(self) -> int:
        """Steps of a finished run, from its summary.json; 0 without one."""
        try:
            return int(json.loads((self.path / "summary.json").read_text(encoding="utf-8"))["steps"])
        except (OSError, ValueError, KeyError, TypeError):
            return 0

    @cached_property
    def last_validation(self) -> tuple[int, list[Row]]:
        """(step, every held-out response) of the last validation; (0, []) without one."""
        files = {int(path.stem.removeprefix("step-")): path for path in self.path.glob("validation/step-*.jsonl")}
        if not files:
            return 0, []
        step = max(files)
        return step, self._rows(f"validation/step-{step}.jsonl", lambda row: _check_numbers(row, "reward"))

    @property
    def names(self) -> list[str]:
        """Names of all metrics, in order of appearance."""
        return list(dict.fromkeys(name for row in self.metrics for name in row if name != "step"))

    def curve(self, name: str) -> Curve:
        """Return a metric over steps, without steps that lack a value to draw."""
        rows = [row for row in self.metrics if row.get(name) is not None]
        points = [(row["step"], row[name]) for row in rows if abs(row[name]) < LARGEST]
        return Curve([step for step, _ in points], [value for _, value in points])

    def _rows(self, name: str, *checks: Callable[[Row], object]) -> list[Row]:
        file = self.path / name
        return [row for _, row in json_records(file, *checks)] if file.is_file() else []


def _check_numbers(row: Row, *names: str) -> None:
    """Raise unless every value of the row is a number, or None for one that is not finite."""
    for name in names:
        math.isfinite(0 if row[name] is None else row[name])
