import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet
import pytest

from controller.data.records import check_loss_columns, iter_records, read_records
from workers.errors import DataError

ROWS = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]


def write(path: Path, rows: list[dict]) -> str:
    table = pa.Table.from_pylist(rows)
    match path.suffix:
        case ".jsonl":
            path.write_text("\n".join(map(json.dumps, rows)))
        case ".json":
            path.write_text(json.dumps(rows))
        case ".parquet":
            pa.parquet.write_table(table, path)
        case ".arrow":  # a stream, as `datasets` writes it
            with pa.ipc.new_stream(str(path), table.schema) as stream:
                stream.write_table(table)
    return str(path)


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet", "x.arrow"])
def test_records_keep_their_columns_in_every_kind_of_file(tmp_path: Path, name: str) -> None:
    assert read_records(write(tmp_path / name, ROWS), "prompt") == ROWS


def test_an_arrow_file_is_read_like_a_stream(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_file(str(tmp_path / "x.arrow"), table.schema) as file:
        file.write_table(table)
    assert read_records(str(tmp_path / "x.arrow"), "prompt") == ROWS


def test_a_folder_is_read_file_by_file_without_its_metadata(tmp_path: Path) -> None:
    write(tmp_path / "data-00001.arrow", ROWS[1:])
    write(tmp_path / "data-00000.arrow", ROWS[:1])
    (tmp_path / "dataset_info.json").write_text("{}")
    (tmp_path / "state.json").write_text("{}")
    assert read_records(str(tmp_path), "prompt") == ROWS


def test_only_regular_files_are_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.jsonl")
    for path in (tmp_path, tmp_path / "x.jsonl"):  # which reading would wait on for ever
        with pytest.raises(DataError, match=r"x.jsonl is not a regular file"):
            read_records(str(path), "prompt")
    folder = tmp_path / "of.spark" / "table.parquet"  # a folder with the name of a file, as Spark writes it
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
        with pytest.raises(DataError, match=rf"{name}.*(no Unicode text|is not JSON|cannot be read)"):
            read_records(str(bad), "prompt")


def test_records_are_read_as_they_are_asked_for(tmp_path: Path) -> None:
    (tmp_path / "x.jsonl").write_text('{"prompt": "a"}\nnot json\n')
    assert next(iter_records(str(tmp_path / "x.jsonl"), "prompt")) == {"prompt": "a"}


def test_paths_without_data_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"there is no file .*gone.jsonl"):
        read_records(str(tmp_path / "gone.jsonl"), "prompt")
    with pytest.raises(DataError, match=r"holds no data file \(.jsonl, .json, .parquet, .arrow\)"):
        read_records(str(tmp_path), "prompt")
    (tmp_path / "x.csv").write_text("prompt\na\n")
    with pytest.raises(DataError, match=r"x.csv is none of .jsonl"):
        read_records(str(tmp_path / "x.csv"), "prompt")
    write(tmp_path / "x.json", ROWS)
    write(tmp_path / "y.jsonl", ROWS)
    with pytest.raises(DataError, match=r"files of several kinds \(.json, .jsonl\)"):
        read_records(str(tmp_path), "prompt")


@pytest.mark.parametrize("name", ["x.parquet", "x.arrow"])
def test_a_torn_file_is_named(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"PAR1 is not enough")
    with pytest.raises(DataError, match=rf"{name} cannot be read: "):
        read_records(str(tmp_path / name), "prompt")


def test_a_json_file_must_be_a_list(tmp_path: Path) -> None:
    (tmp_path / "x.json").write_text('{"prompt": "a"}')
    with pytest.raises(DataError, match="must be a list of records"):
        read_records(str(tmp_path / "x.json"), "prompt")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\nnot json\n', r"x.jsonl:2 is not JSON"),
        ('{"question": "a"}\n', r"x.jsonl:1 has no 'prompt'; set data.prompt_key"),
        ("[1]\n", r"x.jsonl:1 has no 'prompt'"),
        ("\n", "has no records"),
    ],
)
def test_files_with_wrong_records_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read_records(str(tmp_path / "x.jsonl"), "prompt")


@pytest.mark.parametrize(
    ("records", "message"),
    [
        (
            [{"level": 1}, {"level": "2"}],
            "'level' of algorithm.loss.columns is a number in record 1 and not in record 2",
        ),
        ([{"level": 1}, {}], "record 2 lacks 'level', which algorithm.loss.columns names"),
    ],
)
def test_a_column_for_the_loss_is_in_every_record_and_of_one_kind(records: list, message: str) -> None:
    with pytest.raises(DataError, match=message):
        check_loss_columns("train.jsonl", records, ["level"])


def test_columns_for_the_loss_of_one_kind_pass() -> None:
    check_loss_columns("train.jsonl", [{"level": 1, "tags": ["a"]}, {"level": 2.5, "tags": None}], ["level", "tags"])
