"""Every estimator against its paper, group by group in plain Python, and against answers worked
out by hand.
"""

import functools
import itertools
import statistics
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.algorithm.advantages import (
    ESTIMATORS,
    estimate,
    has_signal,
    maxrl,
    sequence_advantages,
    share_without_signal,
    value_metrics,
)
from controller.config import Config
from controller.config.file import settings as settings_of
from tests.refusals import refused
from workers.batch.remote_batch import RemoteBatch
from workers.errors import DataError
from workers.model.losses import to_metrics
from workers.model.losses.value import value_statistics

EPSILON = 1e-6
Row = tuple[int, float, int, float]
"""group, reward, loss tokens, reward of the greedy response"""


def group_of(rows: list[Row], row: Row) -> list[Row]:
    return [other for other in rows if other[0] == row[0]]


def rewards_of(rows: list[Row]) -> list[float]:
    return [reward for _, reward, _, _ in rows]


def grpo_by_paper(rows: list[Row], row: Row) -> float:
    rewards = rewards_of(group_of(rows, row))
    return (row[1] - statistics.fmean(rewards)) / (
        (statistics.stdev(rewards) if len(rewards) > 1 else 0) + EPSILON
    )


def dr_grpo_by_paper(rows: list[Row], row: Row) -> float:
    return row[1] - statistics.fmean(rewards_of(group_of(rows, row)))


def rloo_by_paper(rows: list[Row], row: Row) -> float:
    others = [other for other in group_of(rows, row) if other is not row]
    return row[1] - statistics.fmean(rewards_of(others)) if others else 0.0


def of_tokens(rows: list[Row], values: list[float], value: float) -> float:
    """Normalised over all tokens of the batch, one by one."""
    tokens = [x for row, x in zip(rows, values, strict=True) for _ in range(row[2])]
    return (value - statistics.fmean(tokens)) / (statistics.pstdev(tokens) + EPSILON)


def reinforce_plus_plus_by_paper(rows: list[Row], row: Row) -> float:
    return of_tokens(rows, rewards_of(rows), row[1])


def reinforce_plus_plus_baseline_by_paper(rows: list[Row], row: Row) -> float:
    return of_tokens(
        rows, [dr_grpo_by_paper(rows, other) for other in rows], dr_grpo_by_paper(rows, row)
    )


def remax_by_paper(rows: list[Row], row: Row) -> float:
    return row[1] - row[3]


def opo_by_paper(rows: list[Row], row: Row) -> float:
    group = group_of(rows, row)
    return row[1] - sum(tokens * reward for _, reward, tokens, _ in group) / sum(
        tokens for _, _, tokens, _ in group
    )


def pass_at_k_by_paper(rows: list[Row], row: Row, k: int) -> float:
    """Every subset of k by itself."""
    group = group_of(rows, row)
    if len(group) <= k:
        return 0.0
    subsets = list(itertools.combinations(group, k))
    best = [max(rewards_of(list(subset))) for subset in subsets]
    mean, std = statistics.fmean(best), statistics.pstdev(best)
    own = [
        (b - mean) / (std + EPSILON)
        for b, s in zip(best, subsets, strict=True)
        if any(m is row for m in s)
    ]
    return statistics.fmean(own)


def maxrl_by_paper(rows: list[Row], row: Row) -> float:
    mean = statistics.fmean(rewards_of(group_of(rows, row)))
    return (row[1] - mean) / mean if mean else 0.0


BY_PAPER: dict[str, Callable[[list[Row], Row], float]] = {
    "grpo": grpo_by_paper,
    "dr_grpo": dr_grpo_by_paper,
    "rloo": rloo_by_paper,
    "reinforce_plus_plus": reinforce_plus_plus_by_paper,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline_by_paper,
    "remax": remax_by_paper,
    "opo": opo_by_paper,
    "pass_at_k": functools.partial(pass_at_k_by_paper, k=2),
    "maxrl": maxrl_by_paper,
    "none": lambda rows, row: 0.0,
}
# Multiples of 1/8: sums of them are exact, so that a group of equal rewards has a deviation of exactly 0.
REWARD = st.integers(0, 64).map(lambda eighths: eighths / 8)
ROWS = st.lists(
    st.tuples(st.integers(0, 4), REWARD, st.integers(1, 20), REWARD),
    min_size=1,
    max_size=30,
)


def batch_of(rows: list[Row]) -> dict[str, np.ndarray]:
    return {
        "group_number": np.array([group for group, _, _, _ in rows]),
        "reward": np.array(rewards_of(rows)),
        "tokens": np.array([tokens for _, _, tokens, _ in rows]),
        "greedy_reward": np.array([greedy for _, _, _, greedy in rows]),
    }


def test_every_estimator_has_a_reference() -> None:
    assert set(BY_PAPER) == set(ESTIMATORS)


@pytest.mark.parametrize("name", BY_PAPER)
@settings(max_examples=40, deadline=None)
@given(rows=ROWS, k=st.integers(1, 4))
def test_the_paper_row_by_row(name: str, rows: list[Row], k: int) -> None:
    # Equal rows are still different sequences.
    rows = [tuple(row) for row in map(list, rows)]
    advantages = estimate(name, batch_of(rows), k=k)
    by_paper = (
        functools.partial(pass_at_k_by_paper, k=k)
        if name == "pass_at_k"
        else BY_PAPER[name]
    )
    assert advantages.dtype == np.float64
    # Deviations near 0 make the division by them the larger part of the error.
    np.testing.assert_allclose(
        advantages, [by_paper(rows, row) for row in rows], rtol=1e-9, atol=1e-9
    )


@pytest.mark.parametrize("name", BY_PAPER)
@settings(max_examples=15, deadline=None)
@given(rows=ROWS, rng=st.randoms())
def test_v4_row_order_carries_no_meaning(name: str, rows: list[Row], rng) -> None:
    order = list(range(len(rows)))
    rng.shuffle(order)
    batch = batch_of(rows)
    shuffled = estimate(
        name, {column: values[order] for column, values in batch.items()}, k=3
    )
    np.testing.assert_allclose(
        shuffled, estimate(name, batch, k=3)[order], rtol=1e-9, atol=1e-9
    )


GROUP = {"group_number": np.zeros(4, int), "reward": np.array([1.0, 0.0, 0.0, 0.0])}


def test_what_cannot_be_estimated_is_refused() -> None:
    with refused("algorithm.advantage=ppo"):
        estimate("ppo", GROUP)
    with refused("'tokens'", DataError):
        estimate("opo", GROUP)
    with refused("-1.0", DataError):
        maxrl(np.array([-1.0, 1.0]), np.array([0, 0]))


def test_signal_is_a_property_of_the_group() -> None:
    signal = has_signal(
        np.array([1.0, 0.5, 1.0, 0.5, 0.5]), np.array(["a", "b", "a", "b", "c"])
    )
    assert signal.tolist() == [False] * 5
    signal = has_signal(
        np.array([1.0, 0.5, 0.0, 0.5, 0.5]), np.array(["a", "b", "a", "b", "c"])
    )
    assert signal.tolist() == [True, False, True, False, False]


def test_the_share_without_signal_counts_each_group_once() -> None:
    """Two of three groups, however many samples they have."""
    rewards = np.array([0.0, 0.5, 1.0, 0.5, 0.5, 0.5])
    uids = np.array(["a", "b", "a", "b", "c", "b"])
    assert share_without_signal(rewards, uids) == pytest.approx(2 / 3)
    assert share_without_signal(rewards[:4], uids[:4]) == 0.5


def test_a_function_reads_samples_and_their_advantages_are_those_of_all_their_rows() -> (
    None
):
    """Of two samples, the first of which has two rows."""
    columns = {
        "sample_number": np.array([5, 5, 7]),
        "response_tokens": np.array([2, 3, 4]),
        "group_number": np.array([0, 0, 1]),
    }
    batch = RemoteBatch(columns, {})
    rewards = np.array([1.0, 1.0, -0.5])

    def function(samples: Mapping[str, np.ndarray]) -> np.ndarray:
        assert samples["group"].tolist() == samples["group_number"].tolist() == [0, 1]
        assert samples["tokens"].tolist() == samples["response_tokens"].tolist() == [5, 4]
        return 2 * samples["reward"]

    settings_of_function = Config().algorithm
    settings_of_function.advantage = "custom"
    advantages = sequence_advantages(settings_of_function, batch, rewards, function)
    assert (advantages.dtype, advantages.tolist()) == (np.float32, [2.0, 2.0, -1.0])
    # Of whole samples too: tokens 5 and 4, mean 1/3, deviation sqrt(5)/3 * 1.5.
    settings_of_function.advantage = "reinforce_plus_plus"
    advantages = sequence_advantages(settings_of_function, batch, rewards)
    expected = np.array([2 / 3, 2 / 3, -5 / 6]) / (np.sqrt(20) / 9 * 1.5)
    assert advantages.tolist() == pytest.approx(expected.tolist(), rel=1e-5)


def test_a_critics_metrics_are_those_before_its_update() -> None:
    values = torch.tensor([0.5, 1.0, 2.0])
    returns = torch.tensor([1.0, 1.0, 3.0])
    metrics = value_metrics(to_metrics([value_statistics(values, returns)]))
    errors = (returns - values).numpy()
    assert metrics == pytest.approx(
        {
            "values": 3.5 / 3,
            "returns": 5 / 3,
            "explained_variance": 1 - errors.var() / returns.numpy().var(),
        }
    )


def test_the_settings_offer_estimators_that_are_there() -> None:
    (setting,) = [
        found for found in settings_of(Config()) if found.key == "algorithm.advantage"
    ]
    # By token, by turn, by a function.
    assert set(setting.choices) == set(ESTIMATORS) | {"gae", "gigpo", "custom"}
