"""Data sets of the Hugging Face hub by name, read through `datasets` from its cache or the network.

    openai/gsm8k:main@test --hub_dataset--> HubDataset("openai/gsm8k", "main", "test")
                           --hub_records--> records

The package `datasets` is required only for hub names. Data sets that are programs are refused.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from workers.errors import ConfigError, DataError, clause

NAME = re.compile(
    r"(?P<name>[\w.-]+/[\w.-]+)(:(?P<subset>[\w.-]+))?(@(?P<split>[\w.:\[\]%+-]+))?"
)
FILES = (".jsonl", ".json", ".parquet", ".arrow", ".csv", ".txt", ".gz")
OLDEST = 4  # earlier versions of `datasets` run a program that comes with the data set


@dataclass(frozen=True)
class HubDataset:
    """One split of a data set. subset: empty means the only one, or the default."""

    name: str
    subset: str
    split: str


def hub_dataset(path: str) -> HubDataset | None:
    """Parse `owner/name[:subset][@split]` from data.train, or None for a file or folder, existing or not.

    A path below an existing folder, or with a data file's ending, is a file.
    """
    match = NAME.fullmatch(path)
    if match is None or Path(path).exists() or Path(match["name"]).suffix in FILES:
        return None
    if Path(path).parts[0] in (".", "..") or Path(path).parent.is_dir():
        return None
    return HubDataset(match["name"], match["subset"] or "", match["split"] or "train")


def check_split(key: str, path: str) -> None:
    """Raise ConfigError for held-out hub data without a split: it has no default."""
    if hub_dataset(path) and "@" not in path:
        raise ConfigError(
            f"{key}={path} names no split of the data set. Add one, as in {path}@test."
        )


def hub_records(path: str, dataset: HubDataset) -> Iterator[tuple[str, Any]]:
    """Yield every record and its name, for messages. Raises DataError, with advice, if the data set cannot be
    read.
    """
    for number, record in enumerate(_load(path, dataset), start=1):
        yield f"{path} record {number}", record


def _load(path: str, dataset: HubDataset) -> Any:
    if find_spec("datasets") is None or int(version("datasets").partition(".")[0]) < OLDEST:
        raise DataError(
            f"there is no file or folder {path}. A data set of the hub of that name is read by the package "
            "datasets: "
            f'`pip install "datasets>={OLDEST}"`, or give a file.'
        )
    from datasets import disable_progress_bars, load_dataset  # seconds

    disable_progress_bars()
    try:
        return load_dataset(dataset.name, dataset.subset or None, split=dataset.split)
    except Exception as error:  # from the package, the hub's client or files, by version
        raise DataError(
            f"there is no file or folder {path}, and no data set of the hub was read by that name "
            f"({type(error).__name__}: {clause(error)}). Where there is a network, `hf download "
            f"{dataset.name} --repo-type dataset --local-dir data/{dataset.name.partition('/')[2]}` fetches "
            "its files: then give that folder."
        ) from None
