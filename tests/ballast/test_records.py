"""Records in memory arrive as the same records in a file do."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ballast.records import data_file
from controller.data.records import read_records
from workers.errors import DataError

VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=5,
)


@settings(max_examples=50)
@given(
    records=st.lists(
        st.dictionaries(st.text(max_size=8), VALUES, min_size=1, max_size=3),
        min_size=1,
        max_size=4,
    )
)
def test_records_are_read_as_they_were_given(
    records: list[dict[str, Any]], tmp_path_factory: Any
) -> None:
    folder = tmp_path_factory.getbasetemp() / "records"
    file = data_file(records, "train", str(folder))
    assert read_records(file) == records
    # By its content, so that a resume finds it again.
    assert data_file(iter(records), "train", str(folder)) == file


def test_paths_are_kept_and_arrays_become_lists(tmp_path: Path) -> None:
    assert data_file(tmp_path / "a.jsonl", "train", "") == str(tmp_path / "a.jsonl")
    assert data_file("owner/name@test", "validation", "") == "owner/name@test"
    record = {
        "prompt": "1",
        "level": np.int64(2),
        "table": np.ones((1, 2)),
        "tensor": torch.zeros(1),
    }
    found = read_records(data_file([record], "train", str(tmp_path)))
    assert found == [{"prompt": "1", "level": 2, "table": [[1.0, 1.0]], "tensor": [0.0]}]


@pytest.mark.parametrize(
    "records", [{"train": []}, ["text"], [{"a": object()}], [{("a", 1): 2}], 5]
)
def test_what_is_not_a_list_of_records_is_refused(records: Any, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="train"):
        data_file(records, "train", str(tmp_path))
    assert not list(tmp_path.iterdir())
