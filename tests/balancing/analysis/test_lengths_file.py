"""Lengths from files: every form that is promised, and what is said about files that are not of it."""

import json
from pathlib import Path

import numpy as np
import pyarrow
import pytest
from pyarrow import parquet

from balancing.analysis.lengths_file import read_json, read_lengths
from balancing.errors import BalancingError, LengthError, LengthFileError


def write(folder, name, text):
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("name", "text", "column"),
    [
        ("a.json", "[5, 70, 9]", None),
        ("a.json", '[{"length": 5, "uid": 1}, {"length": 70}, {"length": 9}]', None),
        ("a.json", '[{"n": 5}, {"n": 70}, {"n": 9}]', "n"),
        ("a.json", '{"model": "x", "lengths": [5, 70, 9]}', None),
        ("a.jsonl", "5\n70\n\n9\n", None),
        ("a.jsonl", '{"tokens": 5}\n{"tokens": 70}\n{"tokens": 9}', None),
        (
            "a.jsonl",
            json.dumps({"ids": [1] * 5})
            + "\n"
            + json.dumps({"ids": [1] * 70})
            + '\n{"ids": 9}',
            "ids",
        ),
        ("a.csv", "5\n70\n9\n", None),
        ("a.csv", "uid,length\na,5\nb,70\nc,9\n", None),
        ("a.csv", '\ufeff"n", "uid"\n5,a\n70,"b,c"\n9,d\n', "n"),
        ("A.CSV", "tokens\n5.0\n70\n9\n", None),
    ],
)
def test_every_form_is_read(tmp_path, name, text, column):
    lengths = read_lengths(write(tmp_path, name, text), column=column)
    assert lengths.dtype == np.int64
    assert lengths.tolist() == [5, 70, 9]


def test_a_runs_folder_gives_its_last_step_or_the_one_asked_for(tmp_path):
    lines = [
        {"step": 1, "lengths": [5, 6]},
        {"step": 12, "lengths": [7]},
        {"step": 9, "lengths": [8]},
    ]
    write(tmp_path, "lengths.jsonl", "".join(json.dumps(line) + "\n" for line in lines))
    assert read_lengths(tmp_path).tolist() == [7]
    assert read_lengths(tmp_path, step=1).tolist() == [5, 6]
    with pytest.raises(LengthFileError, match=r"no step 2\. Its steps are 1 to 12"):
        read_lengths(tmp_path, step=2)


def test_parquet_is_read(tmp_path):
    path = tmp_path / "a.parquet"
    parquet.write_table(
        pyarrow.table({"uid": ["a", "b"], "tokens": [5, 70], "ids": [[1, 2], [3]]}), path
    )
    assert read_lengths(path).tolist() == [5, 70]
    assert read_lengths(path, column="ids").tolist() == [2, 1]
    with pytest.raises(LengthFileError, match="no column 'n', only 'uid', 'tokens', 'ids'"):
        read_lengths(path, column="n")
    path.write_bytes(b"not parquet")
    with pytest.raises(LengthFileError, match="cannot be read as Parquet"):
        read_lengths(path)


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("a.json", "[5, ", r"a\.json is not JSON"),
        ("a.json", "[" * 100_000, r"a\.json is not JSON: it is nested too deep"),
        ("a.jsonl", "5\n" + "1" * 5_000, "line 2 is not JSON: a number has more than"),
        ("a.json", "5", "holds no list"),
        ("a.json", "[]", "holds no lengths"),
        (
            "a.json",
            '[5, {"n": 7}]',
            "entry 1 has no column 'length' or .*, only 'n'. Name one with --column",
        ),
        ("a.json", '[5, "many"]', "not a number: .*many"),
        ("a.json", "[5, null]", "not a number: None"),
        ("a.json", "[5, true]", "not a number: True"),
        ("a.json", '[5, {"length": {}}]', "not a number"),
        ("a.jsonl", "5\n{\n", "line 2 is not JSON"),
        ("a.csv", "", "holds no lengths"),
        ("a.csv", "uid,n\na,5\n", "no column 'length'"),
        ("a.csv", "uid,length\na,5\nb\n", "entry 1 has no column 'length'"),
        ("a.txt", "5", "unknown format"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_in_one_line(tmp_path, name, text, words):
    with pytest.raises(LengthFileError, match=words) as caught:
        read_lengths(write(tmp_path, name, text))
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, BalancingError)


@pytest.mark.parametrize(
    ("text", "words"), [("[5, 0]", r"\[1\] is 0"), ("[5, 2.5]", r"\[1\] is 2.5")]
)
def test_lengths_below_one_or_broken_are_refused(tmp_path, text, words):
    with pytest.raises(LengthError, match=words):
        read_lengths(write(tmp_path, "a.json", text))


def test_missing_files_records_and_text_are_named(tmp_path):
    for missing in ("none.csv", "nowhere"):
        with pytest.raises(LengthFileError, match=f"{missing} is not there"):
            read_lengths(tmp_path / missing)
    with pytest.raises(LengthFileError, match="/dev/zero cannot be read: it is not a file"):
        read_json(Path("/dev/zero"))
    with pytest.raises(
        LengthFileError,
        match=r"lengths\.jsonl is not there. The run has recorded no lengths",
    ):
        read_lengths(tmp_path)
    write(tmp_path, "lengths.jsonl", '{"step": 3}\n')
    with pytest.raises(LengthFileError, match="holds no lengths"):
        read_lengths(tmp_path)
    (tmp_path / "b.json").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(LengthFileError, match="not text in UTF-8"):
        read_lengths(tmp_path / "b.json")
