"""Readers of the dumps that other systems write: a file or a folder --read_dump--> a bundle in memory.

    rows          collects rows, and names the columns that a format lacks
    json_lines    lines of JSON, with the place for messages
    verl          rollouts, JSONL of decoded text
    slime         debug rollouts and debug train data of slime and miles, torch.save without pickled objects
    prime_rl      token exports, JSONL
    verifiers     traces and episodes, JSONL
    nemo_rl       train data, JSONL
    atif          trajectories of Harbor's agents, JSON

A reader names the columns that its format lacks, and why.
"""

import re
from pathlib import Path
from typing import Any

from ballast.audit.bundle import Bundle
from ballast.audit.readers import (
    atif,
    json_lines,
    nemo_rl,
    prime_rl,
    slime,
    verifiers,
    verl,
)
from workers.errors import DataError

SUFFIXES = (".jsonl", ".pt", ".json")
TRAJECTORY = "trajectory.json"
JSONL_READERS = (verl, nemo_rl, prime_rl, verifiers)
KNOWN = (
    "verl's and NeMo-RL's JSONL, prime-rl's token exports, verifiers' traces, "
    "debug data of slime and miles (.pt), ATIF trajectories (.json)"
)


def dump_steps(path: Path) -> list[Path]:
    """Return the dumps at a path by step: a file or a folder for each. Nothing for a path without any."""
    if path.is_file():
        return [path] if path.suffix in SUFFIXES else []
    if any(path.glob("rank_*.jsonl")) or any(path.glob(f"**/{TRAJECTORY}")):
        return [path]
    folders = {file.parent for file in path.glob("step_*/rank_*.jsonl")}
    files = {file for suffix in (".jsonl", ".pt") for file in path.glob(f"*{suffix}")}
    return sorted(folders or files, key=lambda step: (step_number(step), step.name))


def step_number(path: Path) -> int:
    """Return the number in a dump's name, 0 if it has none."""
    digits = re.findall(r"\d{1,18}", path.stem)
    return int(digits[0]) if digits else 0


def read_dump(path: str | Path) -> Bundle:
    """Read a dump of another system as a bundle. Raises DataError for one that no reader knows.

    A folder holds the files of one step: token exports of several ranks, or trajectories.
    """
    path = Path(path)
    if path.is_dir():
        return _read_folder(path)
    if not path.is_file():
        raise DataError(f"{path}: there is no such file. Name a bundle, or a dump.")
    if path.suffix == ".pt":
        return slime.read([path])
    if path.suffix == ".json":
        return _read_json(path)
    return _read_json_lines([path])


def _read_folder(folder: Path) -> Bundle:
    ranks = sorted(folder.glob("rank_*.jsonl"))
    if ranks:
        return _read_json_lines(ranks)
    trajectories = sorted(folder.glob(f"**/{TRAJECTORY}"))
    if trajectories:
        return atif.read(trajectories)
    raise DataError(
        f"{folder}: it has neither a bundle nor a step of a known dump. Known are {KNOWN}."
    )


def _read_json(path: Path) -> Bundle:
    try:
        record = json_lines.read_record(path)
    except DataError:
        return _read_json_lines([path])  # several lines
    if atif.is_trajectory(record):
        return atif.read([path])
    if not any(set(record) >= reader.KEYS for reader in JSONL_READERS):
        raise _unknown(path)
    return _read_json_lines([path])


def _unknown(path: Path) -> DataError:
    return DataError(f"{path}: its keys are of no known dump. Known are {KNOWN}.")


def _read_json_lines(paths: list[Path]) -> Bundle:
    first = _first_record(paths[0])
    for reader in JSONL_READERS:
        if set(first) >= reader.KEYS:
            return reader.read(paths)
    raise _unknown(paths[0])


def _first_record(path: Path) -> dict[str, Any]:
    for _, record in json_lines.read_records(path):
        return record
    raise DataError(f"{path}: it is empty. Name a dump with samples.")


__all__ = ["dump_steps", "read_dump", "step_number"]
