"""Trackers that write into the run's folder: metrics.jsonl and TensorBoard events; and how its files are written."""

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from html import escape
from pathlib import Path
from typing import Any

from balancing.analysis.lengths_file import has_step, json_records
from workers.errors import OutputError


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Inside, what cannot be written (a full disk) is an OutputError that names `path`; the system does not name it."""
    try:
        yield
    except OSError as error:
        raise OutputError(
            f"{path} could not be written: {error.strerror or error}; make room, or set run.dir to another disk."
        ) from error


class JsonLines:
    """A file of JSON lines, each flushed at once, so that a killed run loses nothing. Raises OutputError."""

    def __init__(self, path: Path, *, after: int = 0) -> None:
        """`after`: the step that a run resumes from; later lines, and damaged ones, are removed. 0 keeps
        nothing."""
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


class JsonLinesTracker:
    """metrics.jsonl: a line a step."""

    def __init__(self, path: Path, *, after: int = 0) -> None:
        """`after`: see `JsonLines`."""
        self._lines = JsonLines(path, after=after)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """NaN and infinity, for which JSON has no number, become null."""
        self._lines.write({"step": step} | {name: finite(value) for name, value in metrics.items()})

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """No effect: samples.jsonl and validation/ have them."""

    def close(self, *, succeeded: bool) -> None:
        del succeeded
        self._lines.close()


class TensorBoardTracker:
    """TensorBoard events."""

    def __init__(self, folder: Path, *, after: int = 0) -> None:
        """`after`: the step that a run resumes from; TensorBoard hides later records."""
        from torch.utils.tensorboard import SummaryWriter

        self._folder = folder
        with writing(folder):
            self._writer = SummaryWriter(str(folder), purge_step=after + 1 if after else None)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        with writing(self._folder):
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def table(self, name: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """A table of the tab TEXT."""
        with writing(self._folder):
            self._writer.add_text(name, markdown(rows), step)

    def close(self, *, succeeded: bool) -> None:
        del succeeded
        with writing(self._folder):
            self._writer.close()


def columns_of(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The columns of rows, of which each may lack some."""
    return list(dict.fromkeys(name for row in rows for name in row))


def cell(value: Any) -> Any:
    """A value for a table: a number, or a text; lists and mappings are JSON."""
    if isinstance(value, float):
        return finite(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a table in Markdown. Texts are shown as they are: HTML in them is escaped."""
    names = columns_of(rows)
    lines = [names, ["---"] * len(names), *([_in_markdown(row.get(name, "")) for name in names] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _in_markdown(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(cell(value))
    return escape(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")


def finite(value: float) -> float | None:
    """`value`, or None where JSON has no number for it."""
    return value if math.isfinite(value) else None
