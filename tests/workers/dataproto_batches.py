"""Batches for the tests of DataProto. The reference of a batch is its rows as plain Python values."""

from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st

from workers.dataproto import DataProto

# No deadline: under a loaded machine a batch may take long for reasons of its own.
PROPERTY = settings(deadline=None, max_examples=20)


def jagged(values: torch.Tensor, lengths: list[int]) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(values, offsets_of(lengths))


def offsets_of(lengths: list[int]) -> torch.Tensor:
    return torch.tensor([0, *lengths]).cumsum(0)


def make(lengths: list[int], meta_info: dict[str, Any] | None = None) -> DataProto:
    """Three jagged columns over one offsets tensor (one with features), a jagged one of its own, plain and objects."""
    rows, tokens, offsets = len(lengths), sum(lengths), offsets_of(lengths)
    over = torch.nested.nested_tensor_from_jagged
    return DataProto.from_dict(
        {
            "input_ids": over(torch.arange(tokens), offsets),
            "log_probs": over(torch.arange(tokens) / 8 - 1, offsets),
            "hidden": over(torch.arange(2.0 * tokens).reshape(tokens, 2), offsets),
            "prompts": jagged(torch.arange(2 * rows), [2] * rows),
            "score": torch.arange(rows) / 4,
            "image": torch.arange(rows * 6).reshape(rows, 2, 3),
        },
        {"uid": [f"u{row}" for row in range(rows)], "turns": [[row, {"n": row}] for row in range(rows)]},
        {"step": 3} if meta_info is None else meta_info,
    )


def rows_of(data: DataProto) -> list[dict[str, Any]]:
    """Every row as Python values, read from the values and offsets, not through DataProto's indexing."""
    table: dict[str, list[Any]] = {}
    for key, column in data.batch.items() if data.batch is not None else ():
        table[key] = [row.tolist() for row in (column.unbind() if column.is_nested else column)]
    for key, array in data.non_tensor_batch.items():
        table[key] = list(array)
    return [{key: column[row] for key, column in table.items()} for row in range(len(data))]


def assert_offsets_shared(data: DataProto) -> None:
    assert data.batch is not None
    assert data.batch["input_ids"].offsets() is data.batch["log_probs"].offsets()
    product = data.batch["input_ids"] * data.batch["log_probs"]
    assert torch.equal(product.values(), data.batch["input_ids"].values() * data.batch["log_probs"].values())


LENGTHS = st.lists(st.integers(0, 5), max_size=9)
SOME_LENGTHS = st.lists(st.integers(0, 5), min_size=1, max_size=9)
