"""Trackers that write into the run's folder: metrics.jsonl and TensorBoard events."""

import json
import math
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import TextIO


class JsonLinesTracker:
    """metrics.jsonl: a line a step, flushed at once, so that a killed run loses nothing."""

    def __init__(self, path: Path, *, after: int = 0) -> None:
        """`after`: the step that a run goes on from; later lines come again. 0 keeps nothing."""
        self._lines = lines_until(path, after)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """NaN and infinity, for which JSON has no number, become null."""
        self._lines.write(json.dumps({"step": step} | {name: finite(value) for name, value in metrics.items()}) + "\n")
        self._lines.flush()

    def close(self, *, succeeded: bool) -> None:
        del succeeded
        self._lines.close()


class TensorBoardTracker:
    """TensorBoard events."""

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        """`after`: the step that a run goes on from; TensorBoard hides what was recorded beyond."""
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(folder), purge_step=after + 1 if after else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, succeeded: bool) -> None:
        del succeeded
        self._writer.close()


def lines_until(path: Path, step: int) -> TextIO:
    """A file of JSON lines to append to, without the lines of later steps than `step` or one cut short by a crash."""
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines() if path.exists() else []:
        with suppress(ValueError):
            if step and json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    file = path.open("w", encoding="utf-8")
    file.writelines(kept)
    file.flush()
    return file


def finite(value: float) -> float | None:
    """`value`, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None
