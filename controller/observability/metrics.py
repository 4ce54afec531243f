"""RunWriter: write a run's files - config.yaml, validation/, summary.json, and each step's metrics, lengths, samples
and timeline.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from controller.algorithm.validation_metrics import ScoredResponse
from controller.observability.run_folder import JsonLines, finite, recorded_steps, step_file, writing
from workers.remote_batch import RemoteBatch

if TYPE_CHECKING:
    from controller.observability.trackers import Tracker

SHOWN_RESPONSES = 32  # of a validation, in trackers


class RunWriter:
    """Writes `runs/NAME/`, and passes each step's metrics to the trackers."""

    def __init__(
        self,
        folder: Path,
        config_yaml: str,
        trackers: Sequence["Tracker"],
        *,
        timeline: bool = True,
        after: int = 0,
    ) -> None:
        """trackers: receive the metrics, and are closed with this. after: step to resume from; later records are
        removed. 0 keeps nothing."""
        self.folder = folder
        with writing(folder / "config.yaml"):
            folder.mkdir(parents=True, exist_ok=True)
            (folder / "config.yaml").write_text(config_yaml)
            for step in recorded_steps(folder):
                if step > after:
                    step_file(folder, step).unlink()
        self._trackers = trackers
        self._metrics = JsonLines(folder / "metrics.jsonl", after=after)
        self._lengths = JsonLines(folder / "lengths.jsonl", after=after)
        self._samples = JsonLines(folder / "samples.jsonl", after=after)
        self._timeline = JsonLines(folder / "timeline.jsonl", after=after) if timeline else None

    def step(self, step: int, metrics: Mapping[str, float]) -> None:
        """Record a step's metrics (from 1; 0 is the validation before training); NaN and infinity become null."""
        self._metrics.write({"step": step} | {name: finite(value) for name, value in metrics.items()})
        for tracker in self._trackers:
            tracker.log(step, metrics)

    def lengths(self, step: int, plan: Mapping[str, Any] | None = None, **columns: np.ndarray) -> None:
        """Record the lengths of a step's training sequences, for `python -m balancing runs/NAME`.

        plan: `plan_record` of the step's plan, of the first epoch. columns: int64 [B] each: `lengths`, and the other
        inputs of `plan_batch` by name.
        """
        self._lengths.write(
            {"step": step} | {name: column.tolist() for name, column in columns.items()} | dict(plan or {})
        )

    def samples(self, step: int, examples: Iterable[Mapping[str, Any]]) -> None:
        """Record some samples of a step, for the report and the trackers' tables."""
        rows = list(examples)
        for example in rows:
            numbers = {k: finite(v) if isinstance(v, float) else v for k, v in example.items()}
            self._samples.write({"step": step} | numbers, ensure_ascii=False)
        self._show("samples", step, rows)

    def _show(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        for tracker in self._trackers if rows else ():
            tracker.table(name, step, rows)

    def timeline(self, step: int, record: Mapping[str, Any]) -> None:
        """Record times of phases, samples and micro-steps, for `python -m controller.timeline runs/NAME`."""
        if self._timeline is not None:
            self._timeline.write({"step": step, **record}, separators=(",", ":"))

    def validation(self, step: int, responses: Sequence[ScoredResponse]) -> None:
        """Record a validation's responses in validation/step-N.jsonl, and the first ones in trackers."""
        path = self.folder / "validation" / f"step-{step}.jsonl"
        rows = []
        for response in responses:
            scores = {name: finite(value) for name, value in response.scores.items()}
            record = {"uid": response.uid, "source": response.source} | response.text | scores
            rows.append(record | {"answer": response.answer})
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")
        self._show("validation_samples", step, rows[:SHOWN_RESPONSES])

    def summary(self, values: Mapping[str, Any]) -> None:
        """Write summary.json."""
        with writing(self.folder / "summary.json"):
            (self.folder / "summary.json").write_text(json.dumps(values, indent=2) + "\n")

    def __enter__(self) -> "RunWriter":
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        """Close files and trackers, even if one raises; tell trackers whether the run succeeded."""
        with ExitStack() as closing:
            for tracker in self._trackers:
                closing.callback(tracker.close, succeeded=failure is None)
            for lines in (self._metrics, self._lengths, self._samples, self._timeline):
                if lines is not None:
                    closing.callback(lines.close)


def staleness(
    oldest: np.ndarray, newest: np.ndarray, version_tokens: Mapping[int, int], current: int
) -> dict[str, float]:
    """Measure the age of samples and their tokens, in weight versions.

    oldest, newest: versions that sampled a token of each [B]. version_tokens: tokens by version. current: the policy's.
    """
    age, spanned, tokens = current - oldest, newest - oldest + 1, sum(version_tokens.values())
    return {
        "rollout/staleness_mean": float(age.mean()),
        "rollout/staleness_max": float(age.max()),
        "rollout/versions_per_sample": float(spanned.mean()),
        **{f"rollout/tokens_of_age_{current - v}": n / tokens for v, n in sorted(version_tokens.items())},
    }


def waiting(idle_seconds: float, queued: int, seconds: Mapping[str, float]) -> dict[str, float]:
    """Measure the shares of a step in which the trainer waited for samples, and engines were idle.

    idle_seconds: of engines without a request, mean over engines. queued: requests without an engine. seconds: by
    phase.
    """
    return {
        "rollout/trainer_idle_share": seconds["rollout"] / seconds["step"],
        "rollout/engine_idle_share": min(1.0, idle_seconds / seconds["step"]),
        "rollout/queued": float(queued),
    }


def throughput(
    generated: RemoteBatch, trained: RemoteBatch, seconds: Mapping[str, float], epochs: int = 1
) -> dict[str, float]:
    """Compute a step's rollout and update tokens, and tokens/s of step, wait for samples and update.

    seconds: by phase. epochs: how often the update reads its tokens.
    """
    rates = {
        "tokens/rollout": float(generated["response_tokens"].sum()),
        "throughput/tokens_per_s": float(generated["length"].sum()) / seconds["step"],
        "throughput/rollout_tokens_per_s": float(generated["response_tokens"].sum()) / seconds["rollout"],
    }
    if "update" in seconds:
        updated = update_throughput(trained, seconds, epochs)
        rates |= updated | {"throughput/tokens_per_s": rates["throughput/tokens_per_s"]}
    return rates


def update_throughput(trained: RemoteBatch, seconds: Mapping[str, float], epochs: int = 1) -> dict[str, float]:
    """Compute a step's update tokens over all epochs, and tokens/s of update and step, from `seconds` by phase."""
    tokens = float(epochs * trained["length"].sum())
    return {
        "tokens/update": tokens,
        "throughput/update_tokens_per_s": tokens / seconds["update"],
        "throughput/tokens_per_s": tokens / seconds["step"],
    }
