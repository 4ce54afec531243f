import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from workers.errors import DataError
from workers.model.packing import Sequences, pack


def rows(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    """Row i counts up from 100 * i; all but the first token are predicted."""
    return [
        {"input_ids": 100 * index + torch.arange(length), "loss_mask": torch.arange(length) > 0}
        for index, length in enumerate(lengths)
    ]


lengths_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(lengths_strategy, st.data())
def test_slices_hold_the_tokens_of_their_rows(lengths, data):
    sequences = Sequences.from_list(rows(lengths), {"advantages": torch.arange(len(lengths))})
    start = data.draw(st.integers(0, len(lengths)))
    stop = data.draw(st.integers(start, len(lengths)))
    part = sequences.slice(start, stop)
    expected = [row["input_ids"] for row in rows(lengths)[start:stop]]
    assert part.lengths.tolist() == lengths[start:stop]
    assert part.columns["advantages"].tolist() == list(range(start, stop))
    assert part.tokens["input_ids"].tolist() == (torch.cat(expected).tolist() if expected else [])


@given(lengths_strategy)
def test_packed_row_restarts_positions_and_predicts_within_sequences(lengths):
    row = pack(Sequences.from_list(rows(lengths)))
    assert row.position_ids[0].tolist() == [position for length in lengths for position in range(length)]
    assert row.cu_seqlens.tolist() == [sum(lengths[:index]) for index in range(len(lengths) + 1)]
    assert row.max_length == max(lengths)
    # With ids 100 * sequence + position, the token before a target is its id less one, in the same sequence.
    assert (row.input_ids[0, row.loss_positions - 1] == row.targets - 1).all()
    assert row.sequence_index.tolist() == (row.targets // 100).tolist()
    assert len(row.targets) == sum(lengths) - len(lengths)


def test_only_tokens_with_loss_mask_are_predicted():
    row = pack(
        Sequences.from_list(
            [
                {"input_ids": [5, 6, 7, 8], "loss_mask": [False, True, False, True]},
                {"input_ids": [9, 10], "loss_mask": [False, False]},
                {"input_ids": [11, 12], "loss_mask": [False, True]},
            ]
        )
    )
    assert row.loss_positions.tolist() == [1, 3, 7]
    assert row.targets.tolist() == [6, 8, 12]
    assert row.sequence_index.tolist() == [0, 0, 2]


def test_row_without_sequences_predicts_nothing():
    row = pack(Sequences.from_list(rows([3])).slice(1, 1))
    assert row.input_ids.shape == row.position_ids.shape == (1, 1)
    assert len(row.targets) == 0


def test_narrow_types_of_the_wire_are_widened():
    sequences = Sequences.from_list([{"input_ids": torch.ones(2, dtype=torch.int32), "loss_mask": [0, 1]}])
    assert sequences.tokens["input_ids"].dtype == torch.int64
    assert sequences.tokens["loss_mask"].dtype == torch.bool


def test_loss_on_the_first_token_of_a_sequence_is_refused_by_its_number():
    batch = Sequences.from_list(
        [{"input_ids": [1, 2], "loss_mask": [False, True]}, {"input_ids": [1, 2], "loss_mask": [True, True]}]
    )
    with pytest.raises(DataError, match="first token of sequence 1"):
        pack(batch)


@pytest.mark.parametrize(
    ("batch", "columns", "message"),
    [
        ([], {}, "at least one sequence"),
        ([{"input_ids": [1]}], {}, "loss_mask"),
        ([{"input_ids": [1], "loss_mask": [False, True]}], {}, "different lengths"),
        ([{"input_ids": [], "loss_mask": []}], {}, "sequence 0 has no token"),
        ([{"input_ids": [1], "loss_mask": [False]}, {"input_ids": [1]}], {}, "sequence 1 has columns"),
        ([{"input_ids": [1], "loss_mask": [False]}], {"advantages": [1.0, 2.0]}, "'advantages' holds 2 values for 1"),
    ],
)
def test_batches_that_do_not_fit_together_are_refused(batch, columns, message):
    with pytest.raises(DataError, match=message):
        Sequences.from_list(batch, columns)
