"""Weights of tokens by hand: of sequences of one row, and of samples whose rows stand in several."""

import pytest
import torch

from tests.refusals import refused
from workers.errors import ConfigError, DataError
from workers.model.losses.aggregation import Denominators, aggregate, token_weights
from workers.model.losses.predictions import PackedTokens

ROWS = torch.tensor([0, 0, 0, 1])  # three tokens of the first row, one of the second
DENOMINATORS = Denominators(tokens=10.0, sequences=4.0, groups=2)


def predictions(**columns: list[float]) -> PackedTokens:
    of_tokens = {
        name: torch.tensor(values, dtype=torch.float64) for name, values in columns.items()
    }
    return PackedTokens(columns=of_tokens, sequence_index=ROWS, num_sequences=2)


# Of the first row's sample the row has three of five tokens, and three samples have the four rows.
ALONE = {"group_tokens": [6, 6, 6, 7]}
SAMPLES = {"sample_tokens": [5, 5, 5, 2], "mini_batch_samples": [3, 3, 3, 3]}


@pytest.mark.parametrize(
    ("columns", "aggregation", "expected"),
    [
        (ALONE, "token_mean", [1 / 10] * 4),
        (ALONE, "sequence_mean_token_mean", [1 / (4 * 3)] * 3 + [1 / (4 * 1)]),
        (ALONE, "sequence_mean_token_sum", [1 / 4] * 4),
        (ALONE, "sequence_mean_token_sum_norm", [1 / (4 * 8)] * 4),
        (ALONE, "group_mean_token_mean", [1 / (2 * 6)] * 3 + [1 / (2 * 7)]),
        (SAMPLES, "token_mean", [1 / 10] * 4),
        (SAMPLES, "sequence_mean_token_mean", [1 / (3 * 5)] * 3 + [1 / (3 * 2)]),
        (SAMPLES, "sequence_mean_token_sum", [1 / 3] * 4),
        (SAMPLES, "sequence_mean_token_sum_norm", [1 / (3 * 8)] * 4),
    ],
)
def test_weights_of_sequences_and_of_samples_of_several_rows(
    columns: dict[str, list[float]], aggregation: str, expected: list[float]
) -> None:
    weights = token_weights(
        predictions(**columns), DENOMINATORS, aggregation, constant_length=8
    )
    assert weights.tolist() == pytest.approx(expected)


def test_one_of_each_is_enough_and_none_of_any_is_refused() -> None:
    counts = {"tokens": 1, "sequences": 1, "groups": 1}
    assert Denominators(**counts) == Denominators(1, 1, 1)
    for name in counts:
        with refused("nothing to learn", DataError):
            Denominators(**counts | {name: 0})


def test_an_aggregate_by_a_constant_length_needs_one() -> None:
    losses = torch.tensor([2.0, 0.0, 0.0, 1.0])
    aggregation = "sequence_mean_token_sum_norm"
    share = aggregate(losses, predictions(), DENOMINATORS, aggregation, 8)
    assert share.item() == pytest.approx(3 / (4 * 8))
    with refused("constant_length", ConfigError):
        aggregate(losses, predictions(), DENOMINATORS, aggregation)


def test_what_cannot_be_weighted_is_refused() -> None:
    with refused("aggregation=mean is not a known aggregation", ConfigError):
        token_weights(predictions(), DENOMINATORS, "mean")
    with refused("group_mean_token_mean needs Denominators.groups", DataError):
        token_weights(
            predictions(group_tokens=[1, 1, 1, 1]),
            Denominators(10.0, 4.0),
            "group_mean_token_mean",
        )
