import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from balancing import plan_batch
from balancing.basics.alignment import length_multiple
from tests.refusals import refused
from workers.batch.dataproto import DataProto
from workers.errors import DataError
from workers.model.rows.packing import ModelInput, pack, pad
from workers.model.rows.prefix_rows import pack_shared


def rows(lengths: list[int]) -> list[dict[str, torch.Tensor]]:
    """Row i counts up from 100 * i; all but the first token are predicted."""
    return [
        {
            "input_ids": 100 * index + torch.arange(length),
            "loss_mask": torch.arange(length) > 0,
        }
        for index, length in enumerate(lengths)
    ]


lengths_strategy = st.lists(st.integers(1, 9), min_size=1, max_size=8)


@given(lengths_strategy)
def test_packed_row_restarts_positions_and_predicts_within_sequences(lengths):
    row = pack(DataProto.from_list(rows(lengths)))
    assert row.position_ids[0].tolist() == [
        position for length in lengths for position in range(length)
    ]
    assert row.lengths == row.padded_lengths == tuple(lengths)
    # With ids 100 * sequence + position, the token before a target is its id less one, in the same sequence.
    assert (row.input_ids[0, row.predicting] == row.targets - 1).all()
    assert row.sequence_index.tolist() == (row.targets // 100).tolist()
    assert len(row.targets) == sum(lengths) - len(lengths)


def test_only_tokens_with_loss_mask_are_predicted():
    row = pack(
        DataProto.from_list(
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


@pytest.mark.parametrize("lay_out", [pack, pad, pack_shared])
def test_an_empty_micro_batch_predicts_nothing_and_a_first_token_in_the_loss_is_refused(
    lay_out,
):
    empty = lay_out(DataProto.from_list(rows([3])).slice(1, 1), 4)
    assert empty.input_ids.shape == empty.position_ids.shape == (1, 4)
    assert len(empty.targets) == 0
    batch = DataProto.from_list(
        [
            {"input_ids": [1, 2], "loss_mask": [False, True]},
            {"input_ids": [1, 2], "loss_mask": [True, True]},
        ]
    )
    with refused("sequence 1", DataError):
        lay_out(batch)


def test_p2_p3_each_sequence_is_padded_and_both_lengths_are_kept():
    """For cp = 2; ids are 1 to 4, so that padding shows as 0."""
    sequences = [[1] * 2, [2] * 4, [3] * 6, [4]]
    batch = DataProto.from_list(
        [{"input_ids": ids, "loss_mask": [False] * len(ids)} for ids in sequences]
    )
    row = pack(batch, length_multiple(context_parallel=2, tensor_parallel=1))
    assert (row.lengths, row.padded_lengths) == ((2, 4, 6, 1), (4, 4, 8, 4))
    quarters = [[1, 1, 0, 0], [2] * 4, [3] * 4, [3, 3, 0, 0], [4, 0, 0, 0]]
    assert row.input_ids.view(5, 4).tolist() == quarters


@given(lengths_strategy, st.integers(1, 5))
def test_p3_m1_padding_and_padded_rows_leave_the_predicted_tokens_as_they_are(
    lengths, multiple
):
    batch = DataProto.from_list(rows(lengths))
    packed, padded = pack(batch, multiple), pad(batch, multiple)
    assert max(packed.padded_lengths) % multiple == 0
    for laid_out in (packed, padded):
        assert_predictions_are_those_of(pack(batch), laid_out)
    cells = padded.attention_mask.bool()
    assert padded.input_ids[cells].tolist() == batch.tokens["input_ids"].tolist()
    assert padded.position_ids[cells].tolist() == [
        position for length in lengths for position in range(length)
    ]
    assert not padded.input_ids[~cells].any()
    assert not padded.position_ids[~cells].any()


def assert_predictions_are_those_of(plain: ModelInput, padded: ModelInput) -> None:
    assert padded.loss_positions.tolist() == plain.loss_positions.tolist()
    assert padded.sequence_index.tolist() == plain.sequence_index.tolist()
    assert padded.targets.tolist() == plain.targets.tolist()
    ids, plain_ids = padded.input_ids.flatten(), plain.input_ids.flatten()
    assert ids[padded.predicting].tolist() == plain_ids[plain.predicting].tolist()


@given(
    lengths_strategy,
    st.integers(1, 5),
    st.integers(0, 20),
    st.sampled_from(["packed", "padded"]),
)
@settings(max_examples=30)
def test_d2_m3_no_micro_batch_of_a_plan_has_more_cells_than_the_cap(
    lengths, multiple, spare, layout
):
    batch = DataProto.from_list(rows(lengths))
    cap = -(-max(lengths) // multiple) * multiple + spare
    plan = plan_batch(
        lengths, ranks=1, max_tokens=cap, layout=layout, length_multiple=multiple
    ).for_rank(0)
    ordered = batch.select_idxs(plan.rows)
    for start, stop in plan.mini_batches[0].micro_batches:
        laid_out = (pack if layout == "packed" else pad)(
            ordered.slice(start, stop), multiple
        )
        assert laid_out.input_ids.numel() <= cap
