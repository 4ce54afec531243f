"""Columns of a DataProto: construction, consistency, choosing, uniting, joining."""

import pickle
import re
from typing import Any

import numpy as np
import pytest
import torch
from tensordict import NonTensorData, NonTensorStack, TensorDict

from tests.workers.dataproto_batches import assert_offsets_shared, jagged, make, offsets_of, rows_of
from workers.dataproto import DataProto
from workers.errors import DataError

# --- construction -----------------------------------------------------------------------------------------------------


def test_from_dict_keeps_values_and_offsets_without_copying() -> None:
    values, offsets = torch.arange(7), offsets_of([3, 0, 4])
    over = torch.nested.nested_tensor_from_jagged
    data = DataProto.from_dict({"input_ids": over(values, offsets), "log_probs": over(values.float(), offsets)})
    assert data.batch is not None
    assert data.batch["input_ids"].values().data_ptr() == values.data_ptr()
    assert data.batch["input_ids"].offsets() is offsets
    assert_offsets_shared(data)


def test_from_dict_lets_columns_of_equal_lengths_share_offsets() -> None:
    data = DataProto.from_dict(
        {"input_ids": jagged(torch.arange(5), [2, 3]), "log_probs": jagged(torch.ones(5), [2, 3])}
    )
    assert_offsets_shared(data)


def test_gradients_pass_through_from_dict_and_selection() -> None:
    weights = torch.ones(5, requires_grad=True)
    columns = {"input_ids": jagged(torch.arange(5), [2, 3]), "log_probs": jagged(weights, [2, 3])}
    picked = DataProto.from_dict(columns)[[1, 1]].batch
    assert picked is not None
    picked["log_probs"].values().sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [0, 0, 2, 2, 2]


def test_lists_become_object_arrays_of_one_item_a_row() -> None:
    data = DataProto.from_dict(non_tensors={"messages": [[1, 2], [3, 4]], "uid": ("a", "b")})
    assert data.non_tensor_batch["messages"].shape == (2,)
    assert data.non_tensor_batch["messages"].dtype == object
    assert rows_of(data[1:]) == [{"messages": [3, 4], "uid": "b"}]


def test_constructors_do_not_keep_the_callers_containers() -> None:
    tensors, arrays, meta = {"x": torch.zeros(2)}, {"uid": np.array(["a", "b"], dtype=object)}, {"step": 1}
    tensor_dict = TensorDict(tensors, batch_size=[2])
    for data in (DataProto.from_dict(tensors, arrays, meta), DataProto.from_tensordict(tensor_dict, meta)):
        data.union(DataProto.from_dict({"y": torch.zeros(2)}, {"id": ["c", "d"]}, {"run": 1}))
    assert (list(tensors), list(arrays), meta, list(tensor_dict.keys())) == (["x"], ["uid"], {"step": 1}, ["x"])


def test_tensordict_round_trip() -> None:
    data = make([2, 0, 3], {"step": 3, "tags": ["a", {"b": None}]})
    packed = data.to_tensordict()
    assert isinstance(packed, TensorDict)
    assert packed["uid"] == ["u0", "u1", "u2"]
    back = DataProto.from_tensordict(packed)
    assert rows_of(back) == rows_of(data)
    assert back.meta_info == data.meta_info
    assert_offsets_shared(back)


def test_tensordict_round_trip_of_no_rows_and_of_no_tensors() -> None:
    empty = make([])
    assert rows_of(DataProto.from_tensordict(empty.to_tensordict())) == []
    objects = DataProto.from_dict(non_tensors={"uid": ["a", "b"]})
    assert rows_of(DataProto.from_tensordict(objects.to_tensordict())) == [{"uid": "a"}, {"uid": "b"}]


def test_tensordict_entries_and_meta_info_must_agree() -> None:
    tensor_dict = TensorDict({"x": torch.zeros(2), "step": NonTensorData(3)}, batch_size=[2])
    assert DataProto.from_tensordict(tensor_dict, {"step": 3, "run": "r"}).meta_info == {"step": 3, "run": "r"}
    with pytest.raises(DataError, match="meta_info\\['step'\\]"):
        DataProto.from_tensordict(tensor_dict, {"step": 4})
    with pytest.raises(DataError, match="'x' names a column and a key of meta_info"):
        DataProto.from_dict({"x": torch.zeros(2)}, meta_info={"x": 1}).to_tensordict()


def test_empty_dataproto_has_no_rows() -> None:
    assert len(DataProto()) == 0
    assert len(DataProto(meta_info={"step": 1}).chunk(2)) == 2


# --- consistency ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tensors", "arrays", "message"),
    [
        ({"a": torch.zeros(3), "b": torch.zeros(4)}, {}, r"batch\['b'\] has 4 rows, but batch\['a'\] has 3"),
        ({"a": torch.zeros(3)}, {"uid": ["x"]}, r"non_tensor_batch\['uid'\] has 1 rows, .*\['a'\] has 3"),
        ({"a": jagged(torch.zeros(3), [1, 2]), "b": torch.zeros(4)}, {}, r"batch\['b'\] has 4 rows, .*'a'\] has 2"),
        ({"a": torch.zeros(3)}, {"a": ["x"] * 3}, "'a' stands in batch and in non_tensor_batch"),
        ({"a": torch.tensor(1.0)}, {}, r"batch\['a'\] is a scalar"),
        ({"a": [1, 2]}, {}, r"batch\['a'\] is a list, not a tensor"),
        ({1: torch.zeros(3)}, {}, "column name 1 of batch is a int"),
        ({"a": torch.eye(3).to_sparse()}, {}, r"batch\['a'\] has layout torch.sparse_coo"),
        ({"a": torch.nested.nested_tensor([torch.zeros(2)])}, {}, r"batch\['a'\] is a nested tensor of strided layout"),
        ({"a": jagged(torch.zeros(3, 2), [1, 2]).transpose(1, 2)}, {}, r"batch\['a'\] is ragged in another dimension"),
        ({}, {"uid": "abc"}, r"non_tensor_batch\['uid'\] is a str"),
        ({}, {"uid": np.array(1)}, r"non_tensor_batch\['uid'\] is a scalar"),
    ],
)
def test_unfit_columns_are_refused_by_name(tensors: dict, arrays: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataProto.from_dict(tensors, arrays)


def test_offsets_that_are_no_whole_numbers_are_refused() -> None:
    column = torch.nested.nested_tensor_from_jagged(torch.arange(7), torch.tensor([0.0, 3.0, 7.0]))
    with pytest.raises(DataError, match=r"batch\['ids'\] has offsets of torch.float32"):
        DataProto.from_dict({"ids": column})


@pytest.mark.parametrize("offsets", [[0, 5, 3, 7], [0, 3, 9], [1, 3, 7], [0, 3, 6]])
def test_offsets_that_do_not_cut_the_values_are_refused(offsets: list[int]) -> None:
    column = torch.nested.nested_tensor_from_jagged(torch.arange(7), torch.tensor(offsets))
    with pytest.raises(DataError, match=r"batch\['ids'\] has offsets that do not cut its 7 tokens"):
        DataProto.from_dict({"ids": column})


def test_check_consistency_sees_what_was_assigned_later() -> None:
    data = make([1, 2])
    data.check_consistency()
    data.non_tensor_batch["reward"] = np.zeros(5)
    with pytest.raises(DataError, match=r"non_tensor_batch\['reward'\] has 5 rows, but the batch of tensors .* has 2"):
        data.check_consistency()
    data.non_tensor_batch["reward"] = [1, 2]  # type: ignore[assignment]
    with pytest.raises(DataError, match=r"non_tensor_batch\['reward'\] is a list, not a NumPy array"):
        data.check_consistency()
    del data.non_tensor_batch["reward"]
    assert data.batch is not None
    data.batch["note"] = NonTensorStack(NonTensorData("a"), NonTensorData("b"))
    with pytest.raises(DataError, match=r"batch\['note'\] is a NonTensorStack"):
        data.check_consistency()


def test_a_batch_that_is_no_tensordict_or_has_no_rows_is_refused() -> None:
    with pytest.raises(DataError, match="batch is a dict, not a TensorDict"):
        DataProto({"x": torch.zeros(2)})
    for size in ([], [2, 3]):
        with pytest.raises(DataError, match=re.escape(f"batch size {size}, which must be [rows]")):
            DataProto(TensorDict({"x": torch.zeros(2, 3)}, batch_size=size))
    with pytest.raises(DataError, match="a dict was given where a TensorDict is due"):
        DataProto.from_tensordict({"x": torch.zeros(2)})


# --- columns ----------------------------------------------------------------------------------------------------------


def test_select_takes_named_columns_and_all_of_what_is_not_named() -> None:
    data = make([1, 2])
    part = data.select(batch_keys=["score"], meta_info_keys=[])
    assert part.batch is not None
    assert (list(part.batch.keys()), list(part.non_tensor_batch), part.meta_info) == (["score"], ["uid", "turns"], {})
    assert rows_of(data.select()) == rows_of(data)
    assert len(data.select(batch_keys=[], non_tensor_batch_keys=[])) == 2


def test_select_copies_nothing() -> None:
    data = make([1, 2])
    part = data.select()
    assert part.batch is not None
    part.batch["score"][0] = 7.0
    part.batch["log_probs"].values()[0] = 7.0
    part.non_tensor_batch["turns"][0].append("more")
    first = rows_of(data)[0]
    assert (first["score"], first["log_probs"], first["turns"]) == (7.0, [7.0], [0, {"n": 0}, "more"])


def test_selected_columns_are_united_again() -> None:
    data = make([1, 2])
    scores = data.select(batch_keys="score", non_tensor_batch_keys=[], meta_info_keys=[])
    assert scores.batch is not None
    assert list(scores.batch.keys()) == ["score"]
    others = data.select(batch_keys=["input_ids", "log_probs", "hidden", "prompts", "image"])
    assert others.union(scores) is others
    assert rows_of(others) == rows_of(make([1, 2]))
    assert others.meta_info == {"step": 3}
    assert_offsets_shared(others)


def test_missing_names_are_refused() -> None:
    data = make([1, 2])
    with pytest.raises(DataError, match="batch has no 'reward', only"):
        data.select(batch_keys=["score", "reward"])
    with pytest.raises(DataError, match="non_tensor_batch has no 'id'"):
        data.select(batch_keys=["score"], non_tensor_batch_keys=["id"])
    with pytest.raises(DataError, match=r"meta_info has no 'epoch', only \['step'\]"):
        data.select(meta_info_keys=["epoch"])


def test_union_adds_columns_that_then_share_offsets() -> None:
    data = make([1, 2])
    reply = DataProto.from_dict(
        {"ref_log_probs": jagged(torch.ones(3), [1, 2]), "value": torch.ones(2)}, {"note": ["x", "y"]}, {"seconds": 1.0}
    )
    data.union(reply)
    assert data.batch is not None
    assert data.batch["ref_log_probs"].offsets() is data.batch["input_ids"].offsets()
    assert (data.batch["ref_log_probs"] - data.batch["log_probs"]).values().tolist() == [2.0, 1.875, 1.75]
    assert data.meta_info == {"step": 3, "seconds": 1.0}
    assert reply.batch is not None
    assert set(reply.batch.keys()) == {"ref_log_probs", "value"}
    assert (list(reply.non_tensor_batch), reply.meta_info) == (["note"], {"seconds": 1.0})


def test_union_with_a_batch_without_columns() -> None:
    assert rows_of(make([1, 2]).union(DataProto())) == rows_of(make([1, 2]))
    assert rows_of(DataProto().union(make([1, 2]))) == rows_of(make([1, 2]))
    objects = DataProto.from_dict(non_tensors={"uid": ["a"]}).union(DataProto.from_dict({"x": torch.zeros(1)}))
    assert rows_of(objects) == [{"uid": "a", "x": 0.0}]


def with_nan() -> DataProto:
    nan = float("nan")
    return DataProto.from_dict(
        {"plain": torch.tensor([nan, 1.0]), "ragged": jagged(torch.tensor([1.0, nan, nan]), [1, 2])},
        {
            "objects": [{"a": [nan, (1, nan)]}, np.float32("nan")],
            "floats": np.array([nan, 2.0]),
            "tensors": [torch.tensor(nan), np.array([nan])],
        },
        {"threshold": nan, "table": {"x": np.array([nan, 1])}},
    )


def test_nan_equals_itself_in_union_and_concat() -> None:
    assert len(with_nan().union(with_nan())) == 2
    assert len(DataProto.concat([with_nan(), with_nan()])) == 4


CONFLICTS = [
    (lambda other: other.batch.set("score", torch.tensor([0.0, 9.0])), r"batch\['score'\] differs"),
    (
        lambda other: other.batch.set("score", torch.tensor([0.0, 0.25], dtype=torch.float64)),
        r"float32\[2\] .*float64\[2\]",
    ),
    (lambda other: other.batch.set("score", torch.tensor([0.0, float("nan")])), r"batch\['score'\] differs"),
    (lambda other: other.batch.set("image", torch.zeros(2, 6)), r"batch\['image'\] differs .*int64\[2, 2, 3\] here"),
    (lambda other: other.batch.set("input_ids", jagged(torch.arange(3), [2, 1])), r"batch\['input_ids'\] differs"),
    (lambda other: other.batch.set("input_ids", torch.zeros(2)), r"int64\[2, jagged\] with 3 tokens here"),
    (
        lambda other: other.non_tensor_batch.update(uid=np.array(["u0", "x"], dtype=object)),
        r"non_tensor_batch\['uid'\]",
    ),
    (lambda other: other.non_tensor_batch.update(turns=np.array([1, 2])), r"non_tensor_batch\['turns'\] differs"),
    (lambda other: other.meta_info.update(step=4), r"meta_info\['step'\] is 3 in one part and 4 in another"),
    (lambda other: other.meta_info.update(step=torch.zeros(2)), r"meta_info\['step'\] is 3 .* float32\[2\]"),
]


@pytest.mark.parametrize(("change", "message"), CONFLICTS)
def test_union_refuses_conflicts_and_adds_nothing(change: Any, message: str) -> None:
    data, other = make([1, 2]), make([1, 2])
    assert other.batch is not None
    other.batch["extra"] = torch.zeros(2)
    change(other)
    with pytest.raises(DataError, match=message):
        data.union(other)
    assert rows_of(data) == rows_of(make([1, 2]))
    assert data.meta_info == {"step": 3}


def test_union_needs_equal_row_counts() -> None:
    with pytest.raises(DataError, match="other has 3 rows, but self has 2"):
        make([1, 2]).union(make([1, 2, 3]))
    with pytest.raises(DataError, match="other has 3 rows, but self has 2"):
        make([1, 2]).union(DataProto.from_dict(non_tensors={"note": ["a"] * 3}))
    with pytest.raises(DataError, match="'uid' stands in batch and in non_tensor_batch"):
        make([1, 2]).union(DataProto.from_dict({"uid": torch.zeros(2)}))


# --- concat -----------------------------------------------------------------------------------------------------------


def test_concat_joins_rows_and_keys_of_meta_info() -> None:
    first, second = make([1, 2], {"step": 3, "a": [1]}), make([0, 4, 1], {"step": 3, "b": 2})
    joined = DataProto.concat([first, second])
    assert rows_of(joined) == rows_of(first) + rows_of(second)
    assert joined.meta_info == {"step": 3, "a": [1], "b": 2}
    assert_offsets_shared(joined)


def test_concat_finds_columns_by_name_whatever_their_order() -> None:
    first = DataProto.from_dict({"a": torch.zeros(1), "b": torch.ones(1)})
    second = DataProto.from_dict({"b": torch.ones(1), "a": torch.zeros(1)})
    assert rows_of(DataProto.concat([first, second])) == [{"a": 0.0, "b": 1.0}] * 2


@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        ({"a": torch.zeros(1)}, {"b": torch.zeros(1)}, r"batch\['a'\] is missing in part 1"),
        ({"a": torch.zeros(1)}, {"a": torch.zeros(1), "b": torch.zeros(1)}, r"batch\['b'\] is missing in part 0"),
        ({"a": torch.zeros(1)}, {}, r"batch\['a'\] is missing in part 1"),
        (
            {"a": torch.zeros(1, 2)},
            {"a": torch.zeros(1, 3)},
            r"batch\['a'\] is float32\[1, 2\] .* float32\[1, 3\] in part 1",
        ),
        ({"a": torch.zeros(1)}, {"a": torch.zeros(1, dtype=torch.int32)}, r"float32\[1\] in part 0 and int32\[1\]"),
        ({"a": torch.zeros(1, 2)}, {"a": jagged(torch.zeros(3), [3])}, r"float32\[1, jagged\] with 3 tokens in part 1"),
        ({"a": jagged(torch.zeros(3, 2), [3])}, {"a": jagged(torch.zeros(3, 4), [3])}, r"\[1, jagged, 4\]"),
    ],
)
def test_concat_refuses_parts_that_do_not_match(first: dict, second: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataProto.concat([DataProto.from_dict(first), DataProto.from_dict(second)])


def test_concat_refuses_other_mismatches() -> None:
    with pytest.raises(DataError, match="at least one"):
        DataProto.concat([])
    with pytest.raises(DataError, match=r"meta_info\['step'\] is 3 in one part and 4 in another"):
        DataProto.concat([make([1], {"step": 3}), make([1], {"step": 4})])
    objects = [DataProto.from_dict(non_tensors={"n": array}) for array in (np.zeros(1), np.zeros(1, dtype=np.int64))]
    with pytest.raises(DataError, match=r"non_tensor_batch\['n'\] is float64\[1\] in part 0 and int64\[1\] in part 1"):
        DataProto.concat(objects)
    with pytest.raises(DataError, match=r"non_tensor_batch\['n'\] is missing in part 1"):
        DataProto.concat([objects[0], DataProto()])


def test_strings_of_any_width_join() -> None:
    parts = [DataProto.from_dict(non_tensors={"s": np.array([text])}) for text in ("a", "long")]
    assert list(DataProto.concat(parts).non_tensor_batch["s"]) == ["a", "long"]


def test_no_call_changes_the_batch_that_it_reads() -> None:
    data = make([2, 0, 3])
    data[[2, 0]], data[1:], data.repeat(2), data.chunk(2), data.select(["score"]), data.to_tensordict(), repr(data)
    make([2, 0, 3]).union(data), DataProto.concat([data, data])
    assert rows_of(data) == rows_of(make([2, 0, 3]))
    assert data.meta_info == {"step": 3}


# --- jagged columns with holes, devices, pickle, description ----------------------------------------------------------


def with_holes() -> DataProto:
    """Rows [0 1], [5 6], [10] of a table of width 4, as `torch.nested.narrow` gives them: a view with unused cells."""
    table = torch.arange(12).reshape(3, 4)
    column = torch.nested.narrow(table, 1, torch.tensor([0, 1, 2]), torch.tensor([2, 2, 1]), layout=torch.jagged)
    return DataProto.from_dict({"ids": column})


def test_jagged_columns_with_holes_behave_as_others() -> None:
    data, rows = with_holes(), [{"ids": [0, 1]}, {"ids": [5, 6]}, {"ids": [10]}]
    assert rows_of(data) == rows
    assert rows_of(data[[2, 0]]) == [rows[2], rows[0]]
    assert rows_of(data[1:]) == rows[1:]
    assert rows_of(DataProto.concat(data.chunk(2))) == rows
    assert rows_of(data[1:].repeat(2)) == [rows[1], rows[1], rows[2], rows[2]]
    tight = DataProto.from_dict({"ids": jagged(torch.tensor([0, 1, 5, 6, 10]), [2, 2, 1])})
    assert rows_of(data.union(tight)) == rows
    assert rows_of(data[1:].union(tight[1:])) == rows[1:]


def test_to_moves_in_place_and_returns_self() -> None:
    data = make([1, 2])
    assert data.to("cpu") is data
    assert rows_of(data) == rows_of(make([1, 2]))
    data.to(torch.device("meta"))
    assert data.batch is not None
    assert {column.device.type for column in data.batch.values()} == {"meta"}
    assert data.batch["input_ids"].offsets() is data.batch["log_probs"].offsets()
    assert DataProto(meta_info={"a": 1}).to("cpu").meta_info == {"a": 1}


def test_pickling_keeps_shared_offsets_and_sends_only_the_rows_of_a_view() -> None:
    data = make([1000] * 16)
    part = data.chunk(16)[3]
    sent = pickle.dumps(part)
    assert rows_of(pickle.loads(sent)) == rows_of(part)
    assert_offsets_shared(pickle.loads(sent))
    assert len(sent) < len(pickle.dumps(data)) / 8
    assert part.batch is not None
    assert data.batch is not None
    assert part.batch["input_ids"].values().data_ptr() == data.batch["input_ids"].values()[3000:].data_ptr()


def test_its_text_has_type_and_sizes_of_everything() -> None:
    lines = repr(make([2, 0, 3])).splitlines()
    assert lines[:2] == ["DataProto of 3 rows", "batch"]
    assert "  input_ids: int64[3, jagged] with 5 tokens" in lines
    assert "  hidden: float32[3, jagged, 2] with 5 tokens" in lines
    assert "  image: int64[3, 2, 3]" in lines
    assert lines[lines.index("non_tensor_batch") + 1] == "  uid: object[3]"
    assert lines[-2:] == ["meta_info", "  step: int"]
    assert repr(DataProto()) == "DataProto of 0 rows\nbatch\nnon_tensor_batch\nmeta_info"
