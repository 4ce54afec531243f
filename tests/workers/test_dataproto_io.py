"""Saving and loading a DataProto: what was saved comes back, what cannot be is refused, files execute nothing."""

import json
import math
import pickle
from collections import OrderedDict
from enum import IntEnum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from tests.workers.dataproto_batches import LENGTHS, PROPERTY, assert_offsets_shared, jagged, make, rows_of
from workers.dataproto import DataProto
from workers.dataproto_columns import same
from workers.dataproto_io import STORABLE_DTYPES
from workers.errors import DataError


def round_trip(data: DataProto, path: Path) -> DataProto:
    data.save_to_disk(path)
    return DataProto.load_from_disk(path)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("saved") / "batch.safetensors"


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@PROPERTY
@given(LENGTHS, st.data())
def test_what_was_saved_is_loaded(path: Path, lengths: list[int], draw: st.DataObject) -> None:
    meta = draw.draw(st.dictionaries(st.text(), JSON_VALUES, max_size=3))
    notes = draw.draw(st.lists(JSON_VALUES, min_size=len(lengths), max_size=len(lengths)))
    data = make(lengths, meta).union(DataProto.from_dict(non_tensors={"notes": notes}))
    loaded = round_trip(data, path)
    assert same(rows_of(loaded), rows_of(data))
    assert same(loaded.meta_info, meta)
    assert loaded.get_data_info() == data.get_data_info()
    assert_offsets_shared(loaded)


@pytest.mark.parametrize("dtype", sorted(STORABLE_DTYPES, key=str), ids=str)
def test_every_storable_dtype_comes_back(dtype: torch.dtype, path: Path) -> None:
    raw = torch.arange(48, dtype=torch.uint8) % 2 if dtype is torch.bool else torch.arange(48, dtype=torch.uint8)
    values = raw.to(dtype) if dtype is torch.bool else raw.view(dtype)
    loaded = round_trip(DataProto.from_dict({"x": values}), path).batch
    assert loaded is not None
    assert loaded["x"].dtype is dtype
    assert torch.equal(loaded["x"].view(torch.uint8), values.view(torch.uint8))


def test_numeric_and_string_arrays_keep_their_type_and_shape(path: Path) -> None:
    arrays = {
        "reward": np.array([[0.5, np.nan], [1.0, 2.0]]).T,
        "count": np.array([3, 4], dtype=np.uint16),
        "done": np.array([True, False]),
        "name": np.array(["a", "größer"]),
        "table": np.array([[1, "x"], [None, 2.5]], dtype=object),
    }
    loaded = round_trip(DataProto.from_dict(non_tensors=arrays), path).non_tensor_batch
    for key, array in arrays.items():
        assert loaded[key].dtype == array.dtype
        assert loaded[key].shape == array.shape
        assert same(loaded[key], array)


def test_rows_that_are_lists_of_one_length_stay_lists(path: Path) -> None:
    loaded = round_trip(DataProto.from_dict(non_tensors={"ids": [[1, 2], [3, 4]]}), path)
    assert list(loaded.non_tensor_batch["ids"]) == [[1, 2], [3, 4]]


def test_numpy_scalars_and_subclasses_come_back_as_equal_python_values(path: Path) -> None:
    class Stage(IntEnum):
        TRAIN = 2

    meta = {"a": np.float32(0.1), "b": np.int64(7), "c": np.bool_(True), "d": Stage.TRAIN, "e": OrderedDict(x=1)}
    loaded = round_trip(DataProto(meta_info=meta), path).meta_info
    assert loaded == meta
    assert [type(value) for value in loaded.values()] == [float, int, bool, int, dict]


def test_numbers_that_are_not_finite_come_back(path: Path) -> None:
    loaded = round_trip(DataProto(meta_info={"x": [math.inf, -math.inf, math.nan]}), path).meta_info["x"]
    assert loaded[:2] == [math.inf, -math.inf]
    assert math.isnan(loaded[2])


def test_views_transposed_shared_and_differentiable_columns_are_stored(path: Path) -> None:
    base = torch.arange(12.0, requires_grad=True)
    table = base.view(3, 4)
    data = DataProto.from_dict(
        {
            "left": table[:, :2],
            "again": table[:, :2],
            "turned": base.view(4, 3).t(),
            "conjugate": table[:, 0].cfloat().mul(1j).conj(),
        }
    )
    loaded = round_trip(data, path).batch
    assert loaded is not None
    assert data.batch is not None
    for key, column in data.batch.items():
        assert torch.equal(loaded[key], column.detach())
        loaded[key].zero_()
    assert base.sum().item() == 66


def test_jagged_columns_with_holes_are_stored_without_them(path: Path) -> None:
    holes = torch.nested.narrow(
        torch.arange(12).reshape(3, 4), 1, torch.tensor([0, 1, 2]), torch.tensor([2, 2, 1]), layout=torch.jagged
    )
    loaded = round_trip(DataProto.from_dict({"ids": holes, "more": holes}), path).batch
    assert loaded is not None
    assert loaded["ids"].values().tolist() == [0, 1, 5, 6, 10]
    assert loaded["ids"].offsets() is loaded["more"].offsets()


def test_one_chunk_of_a_large_batch_makes_a_small_file(tmp_path: Path) -> None:
    data = make([1000] * 16)
    data.save_to_disk(tmp_path / "all")
    data.chunk(16)[3].save_to_disk(tmp_path / "part")
    assert (tmp_path / "part").stat().st_size < (tmp_path / "all").stat().st_size / 8


def test_batches_without_columns_or_with_several_batch_dimensions(path: Path) -> None:
    assert round_trip(DataProto(meta_info={"step": 1}), path).batch is None
    assert len(round_trip(make([1, 2]).select([], []), path)) == 2
    loaded = round_trip(DataProto.from_dict({"x": torch.zeros(4, 2, 3)}, num_batch_dims=2), path).batch
    assert loaded is not None
    assert loaded.batch_size == (4, 2)


def test_saving_replaces_a_file_under_a_batch_loaded_from_it(tmp_path: Path) -> None:
    first = round_trip(make([3, 4]), tmp_path / "b")
    make([1]).save_to_disk(str(tmp_path / "b"))
    assert rows_of(first) == rows_of(make([3, 4]))
    assert rows_of(DataProto.load_from_disk(str(tmp_path / "b"))) == rows_of(make([1]))
    assert [file.name for file in tmp_path.iterdir()] == ["b"]


# --- what cannot be stored --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataProto(meta_info={"shape": (1, 2)}), r"meta_info\['shape'\] holds a tuple"),
        (DataProto(meta_info={"nested": {"a": [torch.zeros(1)]}}), r"meta_info\['nested'\] holds a Tensor"),
        (DataProto(meta_info={"by_row": {1: "x"}}), r"meta_info\['by_row'\] holds the key 1"),
        (DataProto(meta_info={2: "x"}), "meta_info holds the key 2"),  # type: ignore[dict-item]
        (DataProto(meta_info={"call": len}), r"meta_info\['call'\] holds a builtin_function_or_method"),
        (DataProto(meta_info={"x": np.longdouble(1)}), r"meta_info\['x'\] holds a longdouble"),
        (
            DataProto.from_dict(non_tensors={"image": ["a", b"b"]}),
            r"non_tensor_batch\['image'\], item 1, holds a bytes",
        ),
        (
            DataProto.from_dict(non_tensors={"mask": [np.zeros(2)]}),
            r"non_tensor_batch\['mask'\], item 0, holds a ndarray",
        ),
        (
            DataProto.from_dict(non_tensors={"day": np.array(["2026-01-01"], "M8[D]")}),
            r"non_tensor_batch\['day'\] has dtype",
        ),
        (DataProto.from_dict(non_tensors={"z": np.zeros(1, complex)}), r"non_tensor_batch\['z'\] has dtype complex128"),
        (
            DataProto.from_dict({"z": torch.zeros(1, dtype=torch.complex128)}),
            r"batch\['z'\] has dtype torch.complex128",
        ),
    ],
)
def test_what_cannot_be_stored_is_refused_by_name(data: DataProto, message: str, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=message):
        data.save_to_disk(tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"cannot be written to .*missing"):
        make([1]).save_to_disk(tmp_path / "missing" / "b")


# --- what cannot be loaded --------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return pytest.fail, ("the file was executed",)


def test_a_pickle_is_refused_and_not_executed(tmp_path: Path) -> None:
    (tmp_path / "b").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(DataError, match="is not a batch saved by save_to_disk"):
        DataProto.load_from_disk(tmp_path / "b")


def test_files_that_are_missing_cut_or_foreign_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no saved batch at .*b"):
        DataProto.load_from_disk(tmp_path / "b")
    make([3, 4]).save_to_disk(tmp_path / "b")
    (tmp_path / "cut").write_bytes((tmp_path / "b").read_bytes()[:-10])
    with pytest.raises(DataError, match="cut is not a batch saved by save_to_disk"):
        DataProto.load_from_disk(tmp_path / "cut")
    save_file({"x": torch.zeros(1)}, tmp_path / "model")
    with pytest.raises(DataError, match="model has format None, not 'ballast-dataproto'"):
        DataProto.load_from_disk(tmp_path / "model")
    save_file({"x": torch.zeros(1)}, tmp_path / "new", metadata={"format": "ballast-dataproto", "version": "99"})
    with pytest.raises(DataError, match="new has version '99' of the format; this program reads '1'"):
        DataProto.load_from_disk(tmp_path / "new")


def forge(path: Path, **changes: Any) -> None:
    """Rewrite a saved batch with other entries in its document, or other tensors."""
    make([1, 2]).save_to_disk(path)
    tensors = load_file(path)
    document = json.loads(bytes(tensors["document"].numpy()))
    document |= {key: value for key, value in changes.items() if not isinstance(value, torch.Tensor)}
    tensors["document"] = torch.frombuffer(bytearray(json.dumps(document).encode()), dtype=torch.uint8)
    tensors |= {key: value for key, value in changes.items() if isinstance(value, torch.Tensor)}
    save_file(tensors, path, metadata={"format": "ballast-dataproto", "version": "1"})


@pytest.mark.parametrize(
    "changes",
    [
        {"batch_size": [3]},
        {"batch_size": [-2]},
        {"batch_size": "x"},
        {"tensors": [{"key": "absent"}]},
        {"tensors": [{"key": "input_ids", "offsets": 7}]},
        {"tensors": 5},
        {"arrays": [{"key": "uid", "kind": "object", "shape": [10**12], "items": []}]},
        {"arrays": [{"key": "uid", "kind": "object", "shape": [], "items": [1]}]},
        {"arrays": [{"key": "uid", "kind": "numeric"}]},
        {"arrays": [{}]},
        {"arrays": [{"key": "uid", "kind": "object", "shape": [3], "items": [1, 2, 3]}]},
        {"meta_info": None},
        {"document": torch.zeros(4, dtype=torch.uint8)},
        {"document": torch.tensor(bytearray(b"[" * 100_000), dtype=torch.uint8)},
        {"offsets/0": torch.tensor([0, 2, 999])},
        {"offsets/0": torch.tensor([0.0, 1.0, 3.0])},
        {"offsets/0": torch.zeros(0, dtype=torch.int64)},
        {"offsets/0": torch.tensor(3)},
        {"tensor/input_ids": torch.tensor(1)},
    ],
    ids=str,
)
def test_forged_files_are_refused(changes: dict[str, Any], tmp_path: Path) -> None:
    forge(tmp_path / "b", **changes)
    with pytest.raises(DataError):
        DataProto.load_from_disk(tmp_path / "b")


def test_a_forged_file_without_changes_loads(tmp_path: Path) -> None:
    forge(tmp_path / "b")
    loaded = DataProto.load_from_disk(tmp_path / "b")
    assert rows_of(loaded) == rows_of(make([1, 2]))
    assert loaded.batch is not None
    assert torch.equal(loaded.batch["prompts"].values(), jagged(torch.arange(4), [2, 2]).values())
