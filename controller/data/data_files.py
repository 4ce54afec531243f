"""Find the files of a data set on this machine, of one split.

    file | folder | folder@split | pattern such as data/part-*.jsonl --data_files--> files, by name

A folder with several splits, as `datasets.save_to_disk` and hub repositories have them, is read one split at
a time.
"""

import glob
import json
import re
from collections.abc import Iterable
from pathlib import Path

import yaml

from controller.config.model_files import about_copy
from workers.errors import DataError

SUFFIXES = (".jsonl", ".json", ".parquet", ".arrow")
UNREAD = (".gz", ".zst", ".bz2", ".xz", ".csv", ".tsv", ".ndjson")
"""Of files that hold records too, and that would be missed beside others."""
BEGINNINGS = {
    b"version https://git-lfs": "is a pointer of Git LFS. Fetch the data with `git lfs pull`",
    b"\x1f\x8b": "is compressed by gzip. Unpack it",
    b"(\xb5/\xfd": "is compressed by zstd. Unpack it",
    b"\xff\xfe": "is in UTF-16. Save it in UTF-8",
    b"\xfe\xff": "is in UTF-16. Save it in UTF-8",
}
"""How files begin whose name says another form, and what to say."""
METADATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json")
"""Files that `datasets` writes next to the records."""
SPLIT_WORDS = {
    **dict.fromkeys(("train", "training"), "train"),
    **dict.fromkeys(("validation", "valid", "val", "dev"), "validation"),
    **dict.fromkeys(("test", "testing", "eval", "evaluation"), "test"),
}
"""Splits by the words that name them in files and folders, as `datasets` reads them."""
_SHARD = re.compile(r"(?P<split>\w+(?:\.\w+)*)-\d{5}-of-\d{5}")
_MANY = re.compile(r"[*?\[]")


def data_files(path: str) -> list[Path]:
    """Find a path's data files, by name. Raises DataError if there are none, or if they belong to several
    splits.
    """
    folder, split = _folder_and_split(path)
    if folder.is_dir():
        files = _of_split(path, _below(folder), split)
    elif not folder.exists() and _MANY.search(path):
        files = _of_split(path, _matching(path), "")
    else:
        return [_file(folder)]
    kinds = sorted({file.suffix for file in files})
    if len(kinds) > 1:
        raise DataError(
            f"{path} holds files of several kinds ({', '.join(kinds)}). Name one of them."
        )
    return files


def data_folder(path: str) -> Path:
    """Return the folder of a data set, in which relative paths of images start."""
    folder, _ = _folder_and_split(path)
    if folder.is_dir():
        return folder
    fixed = _MANY.split(path)[0] if not folder.exists() else path
    return Path(fixed + "x").parent


def is_on_disk(path: str) -> bool:
    """Whether a data set's file or folder exists, or a file of its pattern."""
    folder, _ = _folder_and_split(path)
    return folder.exists() or (
        bool(_MANY.search(path)) and any(glob.iglob(path, recursive=True))
    )


def _folder_and_split(path: str) -> tuple[Path, str]:
    """Cut the split off an existing folder's name, `data/gsm8k@test`."""
    name, mark, split = path.rpartition("@")
    if mark and split and not Path(path).exists() and Path(name).is_dir():
        return Path(name), split
    return Path(path), ""


def _file(path: Path) -> Path:
    if re.match(r"[a-z0-9]+:/", str(path)):  # Path makes one stroke of two
        raise DataError(
            f"{path} is an address, and files of this machine are read. Download it and give its path."
        )
    if not path.exists():
        raise DataError(
            f"there is no file {path} (relative paths start at the working directory){about_copy(str(path))}."
        )
    if path.suffix not in SUFFIXES:
        raise DataError(
            f"{path} is none of {', '.join(SUFFIXES)}, nor a folder of such files."
        )
    _check_regular([path])
    return path


def _below(folder: Path) -> dict[Path, str]:
    """Return the data files below a folder, each with its split."""
    names = sorted(folder.rglob("*"))
    files = list(filter(_is_data, names))
    unread = [
        name for name in names if name.suffix.lower() in UNREAD or _is_in_capitals(name)
    ]
    if unread and files:
        raise DataError(
            f"{folder} holds {unread[0].name}, which would not be read beside {files[0].name}. Convert it "
            f"to one of {', '.join(SUFFIXES)}, or give a pattern that leaves it out, such as "
            f"{folder}/*{files[0].suffix}."
        )
    if not files:
        raise DataError(f"{folder} holds no data file ({', '.join(SUFFIXES)}).")
    _check_regular(files)
    _check_subsets(folder, {file.relative_to(folder).parts[0] for file in files})
    listed = _listed_splits(folder)
    splits = {}
    for file in files:
        inner = file.relative_to(folder)
        splits[file] = inner.parts[0] if inner.parts[0] in listed else _split_of(inner)
    return splits


def _is_in_capitals(file: Path) -> bool:
    return file.suffix not in SUFFIXES and file.suffix.lower() in SUFFIXES


def _matching(pattern: str) -> dict[Path, str]:
    """Return the data files of a pattern, each with its split."""
    files = sorted(
        file for file in map(Path, glob.glob(pattern, recursive=True)) if _is_data(file)
    )
    if not files:
        raise DataError(
            f"{pattern}: no data file ({', '.join(SUFFIXES)}) has a name of this pattern. Correct it."
        )
    _check_regular(files)
    fixed = len(data_folder(pattern).parts)
    return {file: _split_of(Path(*file.parts[fixed:])) for file in files}


def _is_data(file: Path) -> bool:
    return (
        file.suffix in SUFFIXES
        and not file.is_dir()
        and file.name not in METADATA
        and not file.name.startswith((".", "cache-"))
    )


def _check_regular(files: Iterable[Path]) -> None:
    for file in files:
        if not file.is_file():
            raise DataError(
                f"{file} is not a regular file, such as a pipe that is read once. Write the records to a "
                "file."
            )


def check_beginning(file: Path) -> None:
    """Raise DataError for a file whose first bytes are of another form than its name says."""
    with file.open("rb") as content:
        first = content.read(32)
    for beginning, problem in BEGINNINGS.items():
        if first.startswith(beginning):
            raise DataError(f"{file} {problem}.")


def _listed_splits(folder: Path) -> list[str]:
    """Return the splits of a `DatasetDict` that was saved to a folder."""
    try:
        return [
            str(name)
            for name in json.loads((folder / "dataset_dict.json").read_bytes())["splits"]
        ]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        return []


def _check_subsets(folder: Path, names: Iterable[str]) -> None:
    """Raise DataError if the folder is a hub repository of several subsets, by its README.md. names: of its
    folders.
    """
    try:
        head = (folder / "README.md").read_text(encoding="utf-8").split("---")[1]
        declared = {
            str(subset["config_name"]) for subset in yaml.safe_load(head)["configs"]
        }
    except (OSError, ValueError, LookupError, TypeError, yaml.YAMLError):
        return
    subsets = sorted(declared & set(names))
    if len(subsets) > 1:
        raise DataError(
            f"{folder} holds the subsets {', '.join(subsets)}. Give the folder of one: {folder / subsets[0]}."
        )


def _split_of(inner: Path) -> str:
    """Return the split of a file by its name or a folder's, the innermost first, or empty."""
    shard = _SHARD.fullmatch(inner.stem)
    # save_to_disk names its shards data-00000-of-00002.
    if shard and shard["split"] != "data":
        return SPLIT_WORDS.get(shard["split"], shard["split"])
    for name in (inner.stem, *reversed(inner.parts[:-1])):
        for word in reversed(re.split(r"[^a-zA-Z]+", name.lower())):
            if word in SPLIT_WORDS:
                return SPLIT_WORDS[word]
    return ""


def _of_split(path: str, splits: dict[Path, str], split: str) -> list[Path]:
    """Return the files of `split`, or all if it is empty. Files of no split count as training data."""
    names = sorted({name or "train" for name in splits.values()})
    if not split and len(names) > 1:
        advice = f"{path}@{names[-1]}" if Path(path).is_dir() else "a narrower pattern"
        raise DataError(
            f"{path} holds the splits {', '.join(names)}. Name one, as in {advice}."
        )
    if split and split not in names:
        raise DataError(
            f"{path}: there is no split {split} among {', '.join(names)}. Name one of these."
        )
    return [
        file for file, name in splits.items() if not split or (name or "train") == split
    ]
