"""DataProto: rows in, tokens side by side, rows and TensorDicts out again. The reference are rows as Python
values.
"""

import pickle
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.refusals import refused
from workers.batch.dataproto import DataProto, record_column
from workers.batch.remote_batch import RemoteBatch
from workers.errors import DataError

LENGTHS = st.lists(st.integers(1, 9), min_size=1, max_size=8)


def batch_of(lengths: list[int]) -> DataProto:
    """As workers get it; row i counts up from 100 * i."""
    stored = DataProto.from_rows(
        [
            {
                "input_ids": 100 * row + np.arange(length, dtype=np.int32),
                "loss_mask": np.arange(length) > 0,
            }
            for row, length in enumerate(lengths)
        ]
    )
    columns = {
        "reward": np.arange(len(lengths)) / 4,
        "uid": np.array([f"u{row}" for row in range(len(lengths))]),
    }
    return DataProto(stored.lengths, stored.tokens, columns, meta={"step": 3}).as_tensors()


def rows_of(batch: DataProto) -> list[list[Any]]:
    """Ids, reward and uid of every row."""
    ids = [
        part.tolist() for part in batch.tokens["input_ids"].split(batch.lengths.tolist())
    ]
    return [
        list(row)
        for row in zip(
            ids,
            batch.columns["reward"].tolist(),
            batch.objects["uid"].tolist(),
            strict=True,
        )
    ]


def test_numbers_become_tensors_in_types_that_torch_indexes_by_and_others_objects() -> None:
    batch = batch_of([2, 3])
    assert [batch.tokens[name].dtype for name in ("input_ids", "loss_mask")] == [
        torch.int64,
        torch.bool,
    ]
    assert batch.columns["reward"].dtype == torch.float64
    assert rows_of(batch) == [[[0, 1], 0.0, "u0"], [[100, 101, 102], 0.25, "u1"]]
    assert (batch.num_tokens, batch.num_loss_tokens, batch.loss_token_counts.tolist()) == (
        5,
        3,
        [1, 2],
    )
    assert batch.owner.tolist() == [0, 0, 1, 1, 1]


def test_fractions_stay_for_the_engine_to_refuse() -> None:
    batch = DataProto.from_list([{"input_ids": [1.5, 2.0], "loss_mask": [0, 1]}])
    assert batch.tokens["input_ids"].tolist() == [1.5, 2.0]
    assert batch.tokens["loss_mask"].tolist() == [False, True]


@pytest.mark.parametrize(
    ("values", "dtype"),
    [
        ([1, 2.5, True], np.float64),
        ([1, "2"], object),
        (["1", 2], object),
        ([None, 2.5], object),
        ([[1], [2]], object),
    ],
)
def test_a_column_of_a_record_is_of_numbers_if_all_its_values_are(
    values: list[Any], dtype: type
) -> None:
    column = record_column(values)
    assert (column.dtype, column.tolist()) == (dtype, values)


@given(LENGTHS, st.data())
def test_slices_and_selections_are_those_of_a_list_of_rows(
    lengths: list[int], data: st.DataObject
) -> None:
    batch, count = batch_of(lengths), len(lengths)
    start = data.draw(st.integers(0, count))
    stop = data.draw(st.integers(start, count))
    part = batch.slice(start, stop)
    assert rows_of(part) == rows_of(batch)[start:stop]
    assert part.meta == {"step": 3}
    if start < stop:  # nothing is copied
        assert (
            part.tokens["input_ids"].data_ptr() == batch.row(start)["input_ids"].data_ptr()
        )
    indices = data.draw(st.lists(st.integers(0, count - 1), max_size=12))
    chosen = batch.select_idxs(indices)
    assert rows_of(chosen) == [rows_of(batch)[row] for row in indices]
    assert chosen.offsets.tolist() == [
        0,
        *np.cumsum([lengths[row] for row in indices]).tolist(),
    ]
    assert [chosen.row(i)["input_ids"].tolist() for i in range(len(chosen))] == [
        row[0] for row in rows_of(chosen)
    ]


@given(LENGTHS)
def test_a_tensordict_and_a_pickle_hold_the_whole_batch(lengths: list[int]) -> None:
    batch = batch_of(lengths)
    tensor_dict = batch.to_tensordict()
    assert [row.tolist() for row in tensor_dict["input_ids"].unbind()] == [
        row[0] for row in rows_of(batch)
    ]
    # Torch multiplies jagged columns only if they share their offsets.
    assert (tensor_dict["input_ids"] * tensor_dict["loss_mask"]).shape[0] == len(lengths)
    for back in (DataProto.from_tensordict(tensor_dict), pickle.loads(pickle.dumps(batch))):
        assert rows_of(back) == rows_of(batch)
        assert back.tokens["loss_mask"].equal(batch.tokens["loss_mask"])
        assert back.meta == batch.meta


def test_a_tensordict_needs_jagged_columns_of_the_same_rows_and_names_of_one_meaning() -> (
    None
):
    whole = DataProto(
        torch.tensor([1]),
        {"input_ids": torch.ones(1)},
        {"x": torch.zeros(1)},
        meta={"x": 1},
    )
    with refused("'x'", DataError):
        whole.to_tensordict()
    tensor_dict = batch_of([2, 3]).to_tensordict()
    tensor_dict["other"] = batch_of([3, 2]).to_tensordict()["input_ids"]
    with refused("column 'other' has", DataError):
        DataProto.from_tensordict(tensor_dict)
    with pytest.raises(DataError):
        DataProto.from_tensordict(tensor_dict.select("reward"))


@pytest.mark.parametrize(
    ("rows", "columns", "named"),
    [
        ([], {}, "at least one sequence"),
        ([{"input_ids": [1], "loss_mask": [False, True]}], {}, "sequence 0"),
        ([{"input_ids": [1], "loss_mask": [False]}, {"input_ids": [1]}], {}, "sequence 1"),
        (
            [{"input_ids": [1], "loss_mask": [False]}],
            {"advantages": [1.0, 2.0]},
            "'advantages'",
        ),
    ],
)
def test_rows_that_do_not_fit_together_are_refused(
    rows: list, columns: dict, named: str
) -> None:
    with refused(named, DataError):
        DataProto.from_list(rows, columns)


@given(count=st.integers(2, 6), wrong=st.integers(1, 5), more=st.integers(1, 9))
def test_a_column_of_the_wrong_length_is_named_with_both_lengths(
    count: int, wrong: int, more: int
) -> None:
    wrong = min(wrong, count - 1)
    row = {f"column{i}": np.zeros(5 + more * (i == wrong)) for i in range(count)}
    with refused(
        f"column 'column{wrong}' has {5 + more} tokens in sequence 0, but 'column0' has 5",
        DataError,
    ):
        DataProto.from_rows([row])
    with refused(
        f"column 'column{wrong}' has {5 + more} rows, but 'column0' has 5", DataError
    ):
        RemoteBatch(row, {})
