"""Write and read a run's files, by RunWriter and RunFolder.

runs/NAME/   config.yaml  run.log  metrics.jsonl  lengths.jsonl  samples.jsonl  timeline.jsonl
             validation/step-N.jsonl  failures.jsonl  images/DIGEST.png
             samples/{step,update,log-probs}-N.npz (see `controller.rollout.sample_files`)
"""

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from balancing.analysis.lengths_file import check_lengths, has_step, json_records
from controller.observability.recorded_values import finite
from workers.batch.placed_images import PlacedImage
from workers.errors import ConfigError, DataError, OutputError
from workers.images.images import png_of

if TYPE_CHECKING:
    import numpy as np

    from controller.algorithm.validation_metrics import ScoredResponse

Row = dict[str, Any]
LARGEST = 1e100  # limit of a chart, whose axes would overflow
LOG = "run.log"
THUMBNAIL = 96  # pixels of its longer side
SHOWN_RESPONSES = 32  # responses of a validation in trackers


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Turn a failed write (a full disk) in the block into an OutputError that names `path`."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} could not be written: {error.strerror or error}. Make room, or set run.dir to another "
            "disk."
        ) from error


class JsonLines:
    """A file of JSON lines, each flushed. Raises OutputError."""

    def __init__(self, path: Path, *, last_step: int = 0) -> None:
        """last_step: step to resume from, which removes later and damaged lines, 0 for an empty file."""
        self.path = path
        with writing(path):
            records = json_records(path, has_step) if last_step and path.exists() else ()
            path.write_bytes(
                b"".join(
                    line.rstrip(b"\n") + b"\n"
                    for line, row in records
                    if row["step"] <= last_step
                )
            )
            self._file = path.open("a", encoding="utf-8")

    def write(self, record: Mapping[str, Any], **options: Any) -> None:
        with writing(self.path):
            self._file.write(json.dumps(record, **options) + "\n")
            self._file.flush()

    def close(self) -> None:
        with writing(self.path):
            self._file.close()


def step_file(folder: Path, step: int) -> Path:
    """Return the file of a step's samples, kept with run.record_samples."""
    return folder / "samples" / f"step-{step}.npz"


def update_file(folder: Path, step: int) -> Path:
    """Return the file of what a step's update read, next to its samples."""
    return folder / "samples" / f"update-{step}.npz"


def log_probs_file(folder: Path, step: int) -> Path:
    """Return the file of what a step's update computed, next to what it read."""
    return folder / "samples" / f"log-probs-{step}.npz"


def recorded_steps(folder: Path) -> list[int]:
    """List the steps with kept samples, in order."""
    files = step_file(folder, 0).parent.glob("step-*.npz")
    return sorted(
        int(file.stem.removeprefix("step-")) for file in files if file.stem[5:].isdecimal()
    )


def thumbnails(folder: Path, images: Iterable[PlacedImage]) -> str:
    """Write small copies of images for the report, each content once, and return their names in the run's
    folder.
    """
    names = []
    for placed_image in images:
        names.append(f"images/{placed_image.image.digest:016x}.png")
        if not (path := folder / names[-1]).exists():
            picture = placed_image.image.data.open()
            picture.thumbnail((THUMBNAIL, THUMBNAIL))
            with writing(path):
                path.parent.mkdir(exist_ok=True)
                path.write_bytes(png_of(picture))
    return " ".join(names)


class Tracker:
    """Base of services that receive metrics, which ignores them."""

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics."""

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Show `rows`, texts and numbers by column, as the step's table `name`."""

    def close(self, *, succeeded: bool) -> None:
        """Write pending data, and report how the run ended."""


class RunWriter:
    """Writes `runs/NAME/`, and passes each step's metrics to the trackers."""

    def __init__(
        self,
        folder: Path,
        config_yaml: str,
        trackers: Sequence[Tracker],
        *,
        timeline: bool = True,
        last_step: int = 0,
    ) -> None:
        """last_step: step to resume from, which removes later records. The trackers are closed too."""
        self.folder = folder
        with writing(folder / "config.yaml"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(config_yaml)
            for step in recorded_steps(folder):
                if step > last_step:
                    step_file(folder, step).unlink()
                    update_file(folder, step).unlink(missing_ok=True)
                    log_probs_file(folder, step).unlink(missing_ok=True)
        self._trackers = trackers
        self._metrics = JsonLines(folder / "metrics.jsonl", last_step=last_step)
        self._lengths = JsonLines(folder / "lengths.jsonl", last_step=last_step)
        self._samples = JsonLines(folder / "samples.jsonl", last_step=last_step)
        self._failures = JsonLines(folder / "failures.jsonl", last_step=last_step)
        self._timeline = (
            JsonLines(folder / "timeline.jsonl", last_step=last_step) if timeline else None
        )

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record the metrics of a step, of which 0 is the validation before training. NaN and infinity become
        null.
        """
        self._metrics.write(
            {"step": step} | {name: finite(value) for name, value in metrics.items()}
        )
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def lengths(
        self, step: int, plan: Mapping[str, Any] | None = None, **columns: "np.ndarray"
    ) -> None:
        """Record the lengths of a step's training sequences, for `python -m balancing runs/NAME`.

        plan: `plan_record` of the step's plan, of the first epoch. columns: int64 [B] each: `lengths`, and
        the other inputs of `plan_batch` by name.
        """
        self._lengths.write(
            {"step": step}
            | {name: column.tolist() for name, column in columns.items()}
            | dict(plan or {})
        )

    def samples(self, step: int, examples: Iterable[Mapping[str, Any]]) -> None:
        """Record some samples of a step, also in trackers."""
        rows = list(examples)
        for example in rows:
            numbers = {
                k: finite(v) if isinstance(v, float) else v for k, v in example.items()
            }
            self._samples.write({"step": step} | numbers, ensure_ascii=False)
        self._show("samples", step, rows)

    def _show(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for tracker in self._trackers if rows else ():
            tracker.table(name, step, rows)

    def failures(self, step: int, kind: str, count: int, first: str) -> None:
        """Record a step's drops, retries or failures of a kind and cause. first: the first one's place and
        cause.
        """
        self._failures.write(
            {"step": step, "kind": kind, "count": count, "first": first}, ensure_ascii=False
        )

    def timeline(self, step: int, record: Mapping[str, Any]) -> None:
        """Record times of phases, samples and micro-steps, for `python -m ballast timeline runs/NAME`."""
        if self._timeline is not None:
            self._timeline.write({"step": step, **record}, separators=(",", ":"))

    def validation(self, step: int, responses: Sequence["ScoredResponse"]) -> None:
        """Record a validation's responses in validation/step-N.jsonl, and the first ones in trackers."""
        path = self.folder / "validation" / f"step-{step}.jsonl"
        rows = []
        for response in responses:
            scores = {name: finite(value) for name, value in response.scores.items()}
            record = (
                {"uid": response.uid, "source": response.source} | response.text | scores
            )
            rows.append(record | {"answer": response.answer})
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            path.write_text(
                "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
                encoding="utf-8",
            )
        self._show("validation_samples", step, rows[:SHOWN_RESPONSES])

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json."""
        with writing(self.folder / "summary.json"):
            (self.folder / "summary.json").write_text(json.dumps(values, indent=2) + "\n")

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Close files and trackers, even if one raises. Tell trackers whether the run succeeded."""
        with ExitStack() as closing:
            for tracker in self._trackers:
                closing.callback(tracker.close, succeeded=failure is None)
            for lines in (
                self._metrics,
                self._lengths,
                self._samples,
                self._failures,
                self._timeline,
            ):
                if lines is not None:
                    closing.callback(lines.close)


@dataclass(frozen=True)
class Curve:
    steps: list[int]
    values: list[float]


def check_run_folder(folder: Path, option: str = "") -> None:
    """Raise ConfigError unless `folder` holds a run. option: that names it, empty for a word of the command
    line.
    """
    if not (folder / "config.yaml").is_file():
        problem = (
            "holds no run, it has no config.yaml"
            if folder.is_dir()
            else "there is no such folder"
        )
        raise ConfigError(
            f"{option}{' ' * bool(option)}{folder}: {problem}. Give a folder like runs/NAME."
        )


@dataclass(frozen=True)
class RunFolder:
    """Reads a run's files. Missing ones count as empty. Damaged lines are skipped with a warning."""

    path: Path

    @cached_property
    def metrics(self) -> list[Row]:
        """Return a row per step. Raises DataError without any."""
        rows = self._rows("metrics.jsonl", has_step, lambda row: _check_numbers(row, *row))
        if not rows:
            raise DataError(
                f"{self.path / 'metrics.jsonl'} holds no step. Name the folder of a run that has made one."
            )
        return rows

    @cached_property
    def lengths(self) -> dict[int, list[int]]:
        """Lengths of every step's sequences, in batch order."""
        return {
            row["step"]: row["lengths"]
            for row in self._rows("lengths.jsonl", has_step, check_lengths)
        }

    @cached_property
    def samples(self) -> list[Row]:
        """Some samples of every step, see `RolloutBatch.examples`."""
        numbers = ("sample", "response_tokens", "seconds", "reward")
        return self._rows(
            "samples.jsonl", has_step, lambda row: _check_numbers(row, *numbers)
        )

    @cached_property
    def failures(self) -> list[Row]:
        """Drops, retries and failures, by step, kind and cause."""
        return self._rows(
            "failures.jsonl", has_step, lambda row: _check_numbers(row, "count")
        )

    @cached_property
    def timeline(self) -> list[Row]:
        """Records of every step, see `controller.observability.timeline`."""
        return self._rows("timeline.jsonl", has_step)

    @property
    def finished_steps(self) -> int:
        """Steps of a finished run from its summary.json, 0 without one."""
        try:
            return int(
                json.loads((self.path / "summary.json").read_text(encoding="utf-8"))[
                    "steps"
                ]
            )
        except (OSError, ValueError, KeyError, TypeError, RecursionError, OverflowError):
            return 0

    @property
    def validated_steps(self) -> list[int]:
        """Steps with a validation, in order."""
        return sorted(
            int(path.stem.removeprefix("step-"))
            for path in self.path.glob("validation/step-*.jsonl")
        )

    def validation(self, step: int) -> list[Row]:
        """Every held-out response of a validation."""
        return self._rows(
            f"validation/step-{step}.jsonl", lambda row: _check_numbers(row, "reward")
        )

    @property
    def names(self) -> list[str]:
        return list(
            dict.fromkeys(name for row in self.metrics for name in row if name != "step")
        )

    def curve(self, name: str) -> Curve:
        """Return a metric over the steps that have a finite value."""
        rows = [row for row in self.metrics if row.get(name) is not None]
        points = [(row["step"], row[name]) for row in rows if abs(row[name]) < LARGEST]
        return Curve([step for step, _ in points], [value for _, value in points])

    def _rows(self, name: str, *checks: Callable[[Row], object]) -> list[Row]:
        file = self.path / name
        return [row for _, row in json_records(file, *checks)] if file.is_file() else []


def _check_numbers(row: Row, *names: str) -> None:
    """Raise unless every value of the row is a number, or None for a number that is not finite."""
    for name in names:
        math.isfinite(0 if row[name] is None else row[name])
