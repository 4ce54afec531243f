"""Each layout of a data set on disk is read one split at a time, whichever program wrote it."""

import gzip
import json
from pathlib import Path

import pytest

from controller.data.data_files import data_folder, is_on_disk
from controller.data.hub import hub_dataset
from controller.data.records import read_records
from tests.controller.data.test_records import write
from tests.refusals import refused
from workers.errors import DataError

LAYOUTS = {
    "DatasetDict": ["train/data-00000-of-00001.arrow", "test/data-00000-of-00001.arrow"],
    "DatasetDict of odd names": [
        "gold/data-00000-of-00001.arrow",
        "extra/data-00000-of-00001.arrow",
    ],
    "snapshot": ["data/train-00000-of-00001.parquet", "data/test-00000-of-00001.parquet"],
    "snapshot of ultrafeedback": [
        "data/train_sft-00000-of-00001.parquet",
        "data/test_sft-00000-of-00001.parquet",
    ],
    "files": ["train.jsonl", "test.jsonl"],
    "files with a prefix": ["gsm8k_train.jsonl", "gsm8k_test.jsonl"],
    "one unnamed": ["gsm8k.jsonl", "test.jsonl"],
    "folders": ["train/a.json", "validation/a.json"],
    "evaluation": ["training.jsonl", "eval.jsonl"],
}
NAMES = {
    "DatasetDict of odd names": ("gold", "extra"),
    "snapshot of ultrafeedback": ("train_sft", "test_sft"),
    "folders": ("train", "validation"),
}
SHARDS = {
    "save_to_disk": ["data-00000-of-00002.arrow", "data-00001-of-00002.arrow"],
    "shards of a split": [
        "data/train-00000-of-00002.parquet",
        "data/train-00001-of-00002.parquet",
    ],
    "parts": ["part-0.jsonl", "part-1.jsonl"],
    "words within words": ["contest.jsonl", "trained.jsonl"],
    "test files alone": ["test-a.jsonl", "test-b.jsonl"],
}


def _write_files(folder: Path, names: list[str]) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        write(folder / name, [{"prompt": name}])


def _prompts(path: str) -> list[str]:
    return [record["prompt"] for record in read_records(path, "prompt")]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_folder_of_several_splits_is_read_one_split_at_a_time(
    layout: str, tmp_path: Path
) -> None:
    files, splits = LAYOUTS[layout], NAMES.get(layout, ("train", "test"))
    _write_files(tmp_path, files)
    if layout.startswith("DatasetDict"):
        (tmp_path / "dataset_dict.json").write_text(json.dumps({"splits": list(splits)}))
    (tmp_path / "dataset_infos.json").write_text("{}")
    with refused(f"{tmp_path}@", DataError):
        read_records(str(tmp_path), "prompt")
    for file, split in zip(files, splits, strict=True):
        path = f"{tmp_path}@{split}"
        assert _prompts(path) == [file]
        assert (
            is_on_disk(path) and hub_dataset(path) is None and data_folder(path) == tmp_path
        )
    with refused("gone", DataError):
        read_records(f"{tmp_path}@gone", "prompt")


@pytest.mark.parametrize("layout", SHARDS)
def test_files_of_one_split_are_read_together(layout: str, tmp_path: Path) -> None:
    _write_files(tmp_path, SHARDS[layout])
    (tmp_path / "dataset_infos.json").write_text("{}")
    assert _prompts(str(tmp_path)) == SHARDS[layout]


def test_subsets_of_a_hub_repository_are_not_mixed(tmp_path: Path) -> None:
    _write_files(
        tmp_path,
        ["main/train-00000-of-00001.parquet", "socratic/train-00000-of-00001.parquet"],
    )
    subsets = [
        {"config_name": "main", "data_files": "x"},
        {"config_name": "socratic", "data_files": "x"},
    ]
    (tmp_path / "README.md").write_text(f"---\nconfigs: {json.dumps(subsets)}\n---\nText")
    with refused("socratic", DataError):
        read_records(f"{tmp_path}@train", "prompt")
    assert len(_prompts(f"{tmp_path}/main@train")) == 1


def test_a_pattern_names_several_files(tmp_path: Path) -> None:
    _write_files(
        tmp_path,
        [
            "a/part-0.jsonl",
            "a/part-1.jsonl",
            "a/test.jsonl",
            "b/part-2.jsonl",
            "b/notes.json",
        ],
    )
    for pattern, count in (
        ("a/part-*.jsonl", 2),
        ("**/part-?.jsonl", 3),
        ("[ab]/part-[02].jsonl", 2),
    ):
        path = f"{tmp_path}/{pattern}"
        assert len(_prompts(path)) == count and is_on_disk(path)
    assert data_folder(f"{tmp_path}/a/part-*.jsonl") == tmp_path / "a"
    for pattern in ("a/*.jsonl", "b/*", "gone-*.jsonl"):  # a test split, two kinds, nothing
        with refused(pattern, DataError):
            read_records(f"{tmp_path}/{pattern}", "prompt")
    (tmp_path / "[x].jsonl").write_text('{"prompt": "its name is no pattern"}\n')
    assert _prompts(f"{tmp_path}/[x].jsonl") == ["its name is no pattern"]


@pytest.mark.parametrize(
    "text",
    [
        '{"prompt": "a"}\n{"prompt": "b"}',
        '\ufeff{"prompt": "a"}\n{"prompt": "b"}',
        '\n{"prompt": "a"}\r\n\n{"prompt": "b"}\n',
    ],
)
def test_a_json_file_may_hold_one_record_a_line(text: str, tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text(text)
    assert _prompts(str(tmp_path / "x.json")) == ["a", "b"]


@pytest.mark.parametrize(
    "name", ["b.jsonl.gz", "b.csv", "b.ndjson", "b.JSONL", "inner/b.jsonl.zst"]
)
def test_files_of_a_folder_that_nothing_reads_are_not_missed(
    name: str, tmp_path: Path
) -> None:
    _write_files(tmp_path, ["a.jsonl"])
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_bytes(b"x")
    with refused(Path(name).name, DataError):
        read_records(str(tmp_path), "prompt")
    assert _prompts(f"{tmp_path}/*.jsonl") == ["a.jsonl"]


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".parquet", ".arrow"])
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:ab\n", "Git LFS"),
        (gzip.compress(b"{}", mtime=0), "gzip"),
        ('{"prompt": "a"}'.encode("utf-16"), "UTF-16"),
    ],
)
def test_a_file_of_another_form_than_its_name_says_is_named(
    suffix: str, content: bytes, words: str, tmp_path: Path
) -> None:
    (tmp_path / f"x{suffix}").write_bytes(content)
    with refused(words, DataError):
        read_records(f"{tmp_path}/x{suffix}", "prompt")


@pytest.mark.parametrize(
    "address", ["s3://b/x.parquet", "https://x.y/z.jsonl", "hf://datasets/a/b/x.jsonl"]
)
def test_an_address_is_no_missing_file(address: str) -> None:
    with refused("address", DataError):
        read_records(address, "prompt")


def test_a_list_of_records_with_the_name_of_lines_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('[{"prompt": "a"}]')
    with refused("list", DataError):
        read_records(f"{tmp_path}/x.jsonl", "prompt")
