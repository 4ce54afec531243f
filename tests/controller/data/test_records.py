import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from controller.data.records import check_loss_columns, iter_records, read_records
from tests.json_lines import write_lines
from tests.refusals import refused
from workers.errors import DataError

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]


def write(path: Path, rows: list[dict]) -> str:
    table = pa.Table.from_pylist(rows)
    match path.suffix:
        case ".jsonl":
            write_lines(path, rows)
        case ".json":
            path.write_text(json.dumps(rows))
        case ".parquet":
            pa.parquet.write_table(table, path)
        case ".arrow":  # a stream, as `datasets` writes it, or a file
            new = pa.ipc.new_file if path.stem == "file" else pa.ipc.new_stream
            with new(str(path), table.schema) as sink:
                sink.write_table(table)
    return str(path)


@pytest.mark.parametrize(
    "name", ["x.jsonl", "x.json", "x.parquet", "x.arrow", "file.arrow"]
)
def test_records_keep_their_columns_in_every_kind_of_file(
    tmp_path: Path, name: str
) -> None:
    assert read_records(write(tmp_path / name, ROWS), "prompt") == ROWS


def test_a_folder_is_read_file_by_file_without_its_metadata(tmp_path: Path) -> None:
    write(tmp_path / "data-00001.arrow", ROWS[1:])
    write(tmp_path / "data-00000.arrow", ROWS[:1])
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text("{}")
    assert read_records(str(tmp_path), "prompt") == ROWS


def test_only_regular_files_are_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    for path in (tmp_path, tmp_path / "x.jsonl"):  # which reading would wait on for ever
        with refused("x.jsonl", DataError):
            read_records(str(path), "prompt")
    # A folder with the name of a file, as Spark writes it.
    folder = tmp_path / "of.spark" / "table.parquet"
    folder.mkdir(parents=True)
    write(folder / "part.parquet", ROWS)
    assert read_records(str(tmp_path / "of.spark"), "prompt") == ROWS


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x.arrow"])
@pytest.mark.parametrize("column", ["prompt", "note"])
def test_bytes_that_are_no_text_are_named(tmp_path: Path, name: str, column: str) -> None:
    row, bad = {"prompt": "a", "note": "b"} | {column: "c#d"}, tmp_path / name
    whole = Path(write(bad, [row])).read_bytes()
    for half in (b"\xed\xa0\x80", b"\xff\xff\xff"):
        bad.write_bytes(whole.replace(b"c#d", half))
        with refused(name, DataError):
            read_records(str(bad), "prompt")


def test_records_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    assert next(iter_records(str(tmp_path / "x.jsonl"), "prompt")) == {"prompt": "a"}


def test_paths_without_data_are_refused(tmp_path: Path) -> None:
    for missing in (tmp_path / "gone.jsonl", tmp_path):
        with refused(str(missing), DataError):
            read_records(str(missing), "prompt")
    write(tmp_path / "x.json", ROWS)
    write(tmp_path / "y.jsonl", ROWS)
    with refused(str(tmp_path), DataError):  # files of several kinds
        read_records(str(tmp_path), "prompt")


@pytest.mark.parametrize(
    ("name", "text", "named"),
    [
        ("x.csv", "prompt\na\n", "x.csv"),
        ("x.parquet", "PAR1 is not enough", "x.parquet"),
        ("x.arrow", "PAR1 is not enough", "x.arrow"),
        ("x.json", '{"prompt": "a"}', "a list of records"),
        ("x.json", '{"prompt": "a"}\n{"prompt"', "x.json:2"),
        ("x.jsonl", '{"prompt": "a"}\nnot json\n', "x.jsonl:2"),
        ("x.jsonl", '{"question": "a"}\n', "Set data.prompt_key"),
        ("x.jsonl", "[1]\n", "x.jsonl:1"),
        ("x.jsonl", "\n", "x.jsonl"),
    ],
)
def test_files_without_records_are_refused_by_name_and_line(
    tmp_path: Path, name: str, text: str, named: str
) -> None:
    (tmp_path / name).write_text(text)
    with refused(named, DataError):
        read_records(str(tmp_path / name), "prompt")


def test_a_column_for_the_loss_is_in_every_record_and_of_one_kind() -> None:
    check_loss_columns(
        "train.jsonl",
        [{"level": 1, "tags": ["a"]}, {"level": 2.5, "tags": None}],
        ["level", "tags"],
    )
    for second in ({"level": "2"}, {}):
        with refused("algorithm.loss.columns", DataError):
            check_loss_columns("train.jsonl", [{"level": 1}, second], ["level"])
