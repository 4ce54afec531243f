"""GAE against the sum of its paper, by hand, and however the sequences are dealt to ranks."""

from dataclasses import replace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from workers.batch.dataproto import DataProto, object_column
from workers.errors import DataError
from workers.model.losses.returns import (
    KlPenalty,
    discounts,
    gae,
    sequence_kl,
    token_kl,
    token_rewards,
    whiten,
)


def gae_by_paper(
    rewards: list[float], values: list[float], gamma: float, lam: float
) -> list[float]:
    """The sum of eq. 16, term by term."""
    after = [*values, 0.0]
    deltas = [reward + gamma * after[t + 1] - after[t] for t, reward in enumerate(rewards)]
    return [
        sum((gamma * lam) ** (later - t) * deltas[later] for later in range(t, len(deltas)))
        for t in range(len(deltas))
    ]


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 12), max_size=8),
    gamma=st.floats(0.5, 1.0),
    lam=st.floats(0.0, 1.0),
    seed=st.integers(0, 99),
)
def test_gae_equals_the_paper_on_ragged_rows(
    lengths: list[int], gamma: float, lam: float, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    rewards, values = rng.normal(size=(2, sum(lengths)))
    advantages, returns = gae(
        rewards, values, np.array(lengths, dtype=np.int64), gamma=gamma, lam=lam
    )
    expected, start = [], 0
    for length in lengths:
        row = slice(start, start + length)
        expected += gae_by_paper(rewards[row].tolist(), values[row].tolist(), gamma, lam)
        start += length
    np.testing.assert_allclose(advantages, expected, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(returns, advantages + values)


def test_gae_refuses_sizes_that_disagree() -> None:
    with pytest.raises(DataError):
        gae(np.zeros(3), np.zeros(2), np.array([3]))


def test_the_reward_stands_at_the_last_token_of_the_policy() -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [False, True, True, False]},
        {"input_ids": [1, 2], "loss_mask": [False, False]},
        {"input_ids": [1, 2], "loss_mask": [False, True]},
    ]
    sequences = DataProto.from_list(rows, {"reward": [2.0, 5.0, -1.0]})
    assert sequences.loss_token_counts.tolist() == [2, 0, 1]
    assert token_rewards(sequences).tolist() == [0.0, 2.0, -1.0]


def test_a_penalty_is_taken_from_every_token_and_adds_up_over_the_sequence() -> None:
    rows = [
        {
            "input_ids": [1, 2, 3],
            "loss_mask": [False, True, True],
            "old_log_probs": [9.0, -1.0, -2.0],
            "reference_log_probs": [-9.0, -1.5, -1.0],
        },
        {
            "input_ids": [1],
            "loss_mask": [False],
            "old_log_probs": [1.0],
            "reference_log_probs": [2.0],
        },
        {
            "input_ids": [1, 2],
            "loss_mask": [False, True],
            "old_log_probs": [0.0, -3.0],
            "reference_log_probs": [0.0, -1.0],
        },
    ]
    sequences = DataProto.from_list(rows, {"reward": [2.0, 5.0, -1.0]})
    # k1 is log pi - log reference: 0.5 and -1 of the first, -2 of the third.
    assert token_kl(sequences, "k1").tolist() == [0.5, -1.0, -2.0]
    assert sequence_kl(sequences, "k1").tolist() == [-0.5, 0.0, -2.0]
    assert sequence_kl(sequences, "k2").tolist() == [0.625, 0.0, 2.0]
    assert sequence_kl(sequences, "absolute").tolist() == [1.5, 0.0, 2.0]
    assert token_rewards(sequences, KlPenalty(0.5, "k1")).tolist() == [-0.25, 2.5, 0.0]


def test_whitening_is_that_of_float64_even_far_from_zero() -> None:
    values = 1e6 + torch.randn(
        50, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    )
    expected = (values - values.mean()) / values.std(correction=0)
    torch.testing.assert_close(whiten(values), expected, rtol=0, atol=1e-5)
    assert whiten(torch.full((3,), 0.1)).tolist() == [0.0] * 3


def test_whitening_counts_each_value_once() -> None:
    """A value that another rank counts is centred and scaled too, and moves neither mean nor deviation."""
    values = torch.tensor([1.0, 3.0, 100.0])
    whitened = whiten(values, counted=torch.tensor([True, True, False]))
    assert whitened.tolist() == pytest.approx([-1.0, 1.0, 98.0], rel=1e-5)


def test_turns_of_rows_have_their_rewards_and_discounts_at_their_last_tokens() -> None:
    """Two rows with tokens of the policy, of two turns and of one, around a row without."""
    rows = [
        {"input_ids": [1, 2, 3, 4, 5], "loss_mask": [False, True, False, True, True]},
        {"input_ids": [1, 2], "loss_mask": [False, False]},
        {"input_ids": [1, 2, 3], "loss_mask": [False, True, True]},
    ]
    turns = object_column([((1, 2.0), (2, -1.0)), (), ((2, 0.5),)])
    sequences = DataProto.from_list(rows, {"reward": [9.0, 9.0, 9.0]})
    sequences = replace(sequences, objects={"by_turn": turns})
    assert token_rewards(sequences).tolist() == [2.0, 0.0, -1.0, 0.0, 0.5]
    assert discounts(sequences, 0.5, "turn").tolist() == [0.5, 1.0, 0.5, 1.0, 0.5]


def test_a_discount_stands_behind_each_token_or_behind_each_turn() -> None:
    rows = [
        {"input_ids": [1, 2, 3, 4], "loss_mask": [False, True, True, True]},
        {"input_ids": [1, 2, 3, 4], "loss_mask": [False, True, False, True]},
    ]
    sequences = DataProto.from_list(rows, {"reward": [0.0, 0.0]})
    assert discounts(sequences, 0.5, "token").tolist() == [0.5] * 5
    assert discounts(sequences, 0.5, "turn").tolist() == [1.0, 1.0, 0.5, 1.0, 0.5]


def whiten_on_a_rank(values: list[float], bounds: list[int]) -> Tensor:
    own = torch.tensor(values)[bounds[dist.get_rank()] : bounds[dist.get_rank() + 1]]
    return whiten(own, [dist.group.WORLD])


def test_whitening_does_not_depend_on_how_values_are_dealt(ranks) -> None:
    values = [0.5, -1.0, 4.0, 2.0, 0.0]
    alone = whiten(torch.tensor(values))
    for bounds in ([0, 3, 5], [0, 0, 5]):
        parts = ranks.run(whiten_on_a_rank, 2, values, bounds)
        torch.testing.assert_close(torch.cat(parts), alone, rtol=0, atol=1e-12)
