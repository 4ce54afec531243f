"""Rows of a DataProto: selection, order, parts, repetition."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.workers.dataproto_batches import (
    LENGTHS,
    PROPERTY,
    SOME_LENGTHS,
    assert_offsets_shared,
    make,
    rows_of,
)
from workers.dataproto import DataProto
from workers.errors import DataError

# --- rows -------------------------------------------------------------------------------------------------------------


@PROPERTY
@given(SOME_LENGTHS, st.data())
def test_index_forms_agree(lengths: list[int], draw: st.DataObject) -> None:
    data = make(lengths)
    rows = len(data)
    picked = draw.draw(st.lists(st.integers(-rows, rows - 1), max_size=12))
    expected = [rows_of(data)[row] for row in picked]
    forms: list[Any] = [picked, np.array(picked, dtype=np.int32), torch.tensor(picked, dtype=torch.int64)]
    for form in forms:
        part = data[form]
        assert rows_of(part) == expected
        assert_offsets_shared(part)


@PROPERTY
@given(LENGTHS, st.data())
def test_masks_select_the_true_rows(lengths: list[int], draw: st.DataObject) -> None:
    data = make(lengths)
    mask = draw.draw(st.lists(st.booleans(), min_size=len(lengths), max_size=len(lengths)))
    expected = [row for row, chosen in zip(rows_of(data), mask, strict=True) if chosen]
    for form in (mask, np.array(mask, dtype=bool), torch.tensor(mask, dtype=torch.bool)):
        part = data[form]
        assert rows_of(part) == expected
        assert_offsets_shared(part)


BOUND = st.none() | st.integers(-12, 12)


@PROPERTY
@given(LENGTHS, BOUND, BOUND, st.none() | st.integers(-3, 3).filter(bool))
def test_slices_are_those_of_a_list(lengths: list[int], start: int | None, end: int | None, step: int | None) -> None:
    data = make(lengths)
    for part in (data[start:end:step], data.slice(start=start, end=end, step=step)):
        assert rows_of(part) == rows_of(data)[start:end:step]
        assert_offsets_shared(part)


def test_slices_are_views_and_a_full_slice_is_another_batch() -> None:
    data = make([2, 3])
    part = data[:]
    assert data.batch is not None
    assert part.batch is not None
    assert data[1:].batch["input_ids"].values().data_ptr() == data.batch["input_ids"].values()[2:].data_ptr()
    part.batch["extra"] = torch.zeros(2)
    part.meta_info["step"] = 9
    assert "extra" not in data.batch.keys()  # noqa: SIM118
    assert data.meta_info == {"step": 3}


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (1, "selected by slice, list, array, tensor or mask, not by int"),
        ([0, 3], "row 3 does not exist in a batch of 3 rows"),
        (np.array([-5]), "row -5 does not exist"),
        ([True, False], "mask of 2 entries cannot select among 3 rows"),
        (torch.ones(4, dtype=torch.bool), "mask of 4 entries"),
        (np.array([], dtype=bool), "mask of 0 entries"),
        ([0.5], "not by float"),
        (torch.zeros(2), "not by float32"),
        (torch.tensor(0.5), "one-dimensional"),
        (torch.zeros(1, 2, dtype=torch.long), r"not by shape \[1, 2\]"),
        (True, "not by bool"),
        ("uid", "not by str"),
        ((0, 1), "not by tuple"),
        (None, "not by NoneType"),
        (["a"], "cannot be selected by list"),
        (np.array(["a"], dtype=object), "cannot be selected by object"),
        (slice(0, 2, 0), "cannot be sliced by 0:2:0"),
        (slice("a"), "cannot be sliced"),
    ],
)
def test_bad_indices_are_refused(index: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        make([1, 2, 3])[index]


@PROPERTY
@given(LENGTHS, st.data())
def test_reorder_and_its_inverse_restore_the_batch(lengths: list[int], draw: st.DataObject) -> None:
    data = make(lengths)
    before = rows_of(data)
    order = draw.draw(st.permutations(range(len(lengths))))
    assert data.reorder(torch.tensor(order, dtype=torch.int64)) is None  # type: ignore[func-returns-value]
    assert rows_of(data) == [before[row] for row in order]
    assert_offsets_shared(data)
    data.reorder(np.argsort(order))
    assert rows_of(data) == before


@pytest.mark.parametrize("indices", [[0, 0, 1], [0, 1], [0, 1, 2, 2], [True, True, False]])
def test_reorder_refuses_what_would_drop_or_repeat_rows(indices: list[int]) -> None:
    data = make([1, 2, 3])
    with pytest.raises(DataError, match="not a permutation of 3 rows"):
        data.reorder(indices)
    assert rows_of(data) == rows_of(make([1, 2, 3]))


@PROPERTY
@given(LENGTHS, st.integers(1, 4))
def test_repeat_then_unrepeat(lengths: list[int], times: int) -> None:
    data = make(lengths)
    rows = rows_of(data)
    aside = data.repeat(repeat_times=times, interleave=True)
    assert rows_of(aside) == [row for row in rows for _ in range(times)]
    assert rows_of(aside[::times]) == rows
    below = data.repeat(repeat_times=times, interleave=False)
    assert rows_of(below) == rows * times
    assert rows_of(below[: len(data)]) == rows
    assert_offsets_shared(aside)


def test_repeat_is_twice_and_interleaved_unless_told() -> None:
    assert list(make([1, 2]).repeat().non_tensor_batch["uid"]) == ["u0", "u0", "u1", "u1"]


@PROPERTY
@given(LENGTHS, st.integers(1, 12))
def test_chunk_and_concat_are_inverse(lengths: list[int], chunks: int) -> None:
    data = make(lengths)
    parts = data.chunk(chunks)
    sizes = [len(part) for part in parts]
    assert len(parts) == chunks
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] - sizes[-1] <= 1
    joined = DataProto.concat(parts)
    assert rows_of(joined) == rows_of(data)
    assert joined.meta_info == data.meta_info
    assert_offsets_shared(joined)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda data: data.chunk(0), "chunks=0"),
        (lambda data: data.repeat(0), "repeat_times=0"),
        (lambda data: data.repeat(1.5), "repeat_times=1.5"),
    ],
)
def test_bad_sizes_are_refused(call: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        call(make([1, 2]))
