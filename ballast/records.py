"""Write data sets in memory to files, which a run reads, records and resumes with.

[{"prompt": ...}, ...] or datasets.Dataset --data_file--> runs/.data/3f0c....jsonl, named by its content
"""

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from workers.errors import DataError, OutputError

Records = str | Path | Iterable[Mapping[str, Any]]
"""Records, one mapping each, such as a list or a `datasets.Dataset`. A path or hub name works as in the
setting.
"""


def data_file(records: Records, name: str, run_dir: str) -> str:
    """Write `records` to a file in `run_dir`, and return the data setting's value. A path is returned
    unchanged.

    name: of the argument, for messages. Raises DataError unless they are records with JSON values.
    """
    if isinstance(records, (str, Path)):
        return str(records)
    if isinstance(records, Mapping) or not isinstance(records, Iterable):
        raise DataError(
            f"{name}: a {type(records).__name__} is not a list of records. Give one split, or a list."
        )
    lines = "".join(
        _line(record, f"{name}: record {number}")
        for number, record in enumerate(records, start=1)
    )
    file = (
        Path(run_dir) / ".data" / f"{hashlib.sha256(lines.encode()).hexdigest()[:16]}.jsonl"
    )
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        unfinished = file.with_suffix(f".{os.getpid()}")  # two runs may write it at once
        unfinished.write_text(lines)
        unfinished.replace(file)
    except OSError as error:
        raise OutputError(
            f"{file}: {error.strerror}. Set run.dir to a folder that can be written."
        ) from None
    return str(file)


def _line(record: Any, place: str) -> str:
    if not isinstance(record, Mapping):
        raise DataError(
            f"{place} is a {type(record).__name__}, not a mapping of columns to values. Make it one."
        )
    try:
        return json.dumps(dict(record), default=_plain) + "\n"
    except (TypeError, ValueError, RecursionError) as error:
        raise DataError(
            f"{place} is not JSON: {error}. Give texts, numbers, lists and mappings."
        ) from None


def _plain(value: Any) -> Any:
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__}")
