"""Compute advantages on the driver: how much better each sequence was than expected.

    rewards, groups --estimator of the registry--> one advantage a sequence
                                                   compared with the group, or the batch

Advantages of tokens, compared with a critic, are computed on the ranks: `workers.model.losses.returns`.
Groups may have any size, and row order does not matter. A group of one has advantage 0 if the estimator
compares within the group alone.

Estimators take rewards, float [B], and groups, int64 [B] (samples of one prompt have one number), and return
float64 [B].
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import comb
from typing import Any

import numpy as np

from controller.config.algorithm import AlgorithmConfig
from workers.batch.metrics import Metrics, results
from workers.batch.remote_batch import RemoteBatch
from workers.config.roles import KlInRewardConfig
from workers.errors import ConfigError, DataError
from workers.model.losses import explained_variance

# Errors are clipped here, so that one outlier step does not derail the weight.
LARGEST_KL_ERROR = 0.2
EPSILON = 1e-6  # keeps the advantages of a group with equal rewards at 0


@dataclass(frozen=True)
class Estimator:
    """columns: keywords of `function` that are columns [B] of the batch. options: keywords that are settings.

    slope: dA_i / dr_i with the baseline and the scale held, which the group's samples give. None for other
    forms.
    """

    function: Callable[..., np.ndarray]
    columns: tuple[str, ...]
    options: tuple[str, ...]
    slope: Callable[..., np.ndarray] | None


ESTIMATORS: dict[str, Estimator] = {}


def estimator(
    name: str,
    *,
    columns: tuple[str, ...] = (),
    options: tuple[str, ...] = (),
    slope: Callable[..., np.ndarray] | None = None,
) -> Callable[..., Any]:
    """Register an estimator under its name in `algorithm.advantage`."""

    def register(function: Callable[..., np.ndarray]) -> Callable[..., np.ndarray]:
        ESTIMATORS[name] = Estimator(function, columns, options, slope)
        return function

    return register


def estimate(name: str, batch: Mapping[str, np.ndarray], **options: Any) -> np.ndarray:
    """Return an advantage per sequence by the estimator `name`, float64 [B].

    batch: `reward`, `group_number` and the estimator's columns. options: settings of all estimators. Raises
    ConfigError for an unknown name, DataError for a missing column.
    """
    if name not in ESTIMATORS:
        raise ConfigError(
            f"algorithm.advantage={name} is not an estimator. Known are {', '.join(ESTIMATORS)}"
        )
    estimator = ESTIMATORS[name]
    missing = [
        column
        for column in ("reward", "group_number", *estimator.columns)
        if column not in batch
    ]
    if missing:
        raise DataError(
            f"algorithm.advantage={name} needs the column {missing[0]!r}. The batch has {sorted(batch)}"
        )
    keywords = {column: batch[column] for column in estimator.columns}
    keywords |= {
        option: options[option] for option in estimator.options if option in options
    }
    return estimator.function(batch["reward"], batch["group_number"], **keywords)


def _one(rewards: np.ndarray, groups: np.ndarray, **_: Any) -> np.ndarray:
    return np.ones(len(rewards))


def _per_deviation(
    rewards: np.ndarray, groups: np.ndarray, *, normalize_by_std: bool = True
) -> np.ndarray:
    """0 in a group of equal rewards, whose deviation says nothing."""
    deviation = _deviation(rewards, groups)
    slopes = np.divide(
        1.0, deviation + EPSILON, out=np.zeros(len(rewards)), where=deviation > EPSILON
    )
    return slopes if normalize_by_std else _one(rewards, groups)


def _per_mean(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    mean = _mean(rewards, groups)
    return np.divide(1.0, mean, out=np.zeros(len(rewards)), where=mean > 0)


@estimator("grpo", options=("normalize_by_std",), slope=_per_deviation)
def grpo(
    rewards: np.ndarray,
    groups: np.ndarray,
    *,
    normalize_by_std: bool = True,
    epsilon: float = EPSILON,
) -> np.ndarray:
    """Group-relative advantage (Shao et al. 2024, DeepSeekMath, section 4.1.2).

        A_i = (r_i - mean(r)) / (std(r) + epsilon)      over the group of i

    Without `normalize_by_std` only the numerator, see `dr_grpo`. The standard deviation is the sample's (n -
    1), as in TRL and verl.
    """
    centred = rewards - _mean(rewards, groups)
    return (
        centred / (_deviation(rewards, groups) + epsilon) if normalize_by_std else centred
    )


@estimator("none")
def none(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Return 0: the loss has other terms, such as distillation."""
    return np.zeros(len(rewards))


@estimator("dr_grpo", slope=_one)
def dr_grpo(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """GRPO done right (Liu et al. 2025, "Understanding R1-Zero-Like Training", section 3.2).

        A_i = r_i - mean(r)      over the group of i

    Dividing by the standard deviation would overweight too easy and too hard prompts. The matching loss has
    `aggregation=sequence_mean_token_sum_norm`.
    """
    return grpo(rewards, groups, normalize_by_std=False)


@estimator("rloo", slope=_one)
def rloo(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """REINFORCE leave-one-out (Kool et al. 2019, Ahmadian et al. 2024, section 3).

        A_i = r_i - sum over j != i of r_j / (n - 1) = n / (n - 1) * (r_i - mean(r))
        over the group of i, of size n

    The baseline is independent of the sequence, so the gradient is unbiased.
    """
    count = _count(groups)
    return (rewards - _mean(rewards, groups)) * count / np.maximum(count - 1, 1)


@estimator("reinforce_plus_plus", columns=("tokens",))
def reinforce_plus_plus(
    rewards: np.ndarray, groups: np.ndarray, *, tokens: np.ndarray, epsilon: float = EPSILON
) -> np.ndarray:
    """REINFORCE++ (Hu et al. 2025): no critic and no groups, normalised over the tokens of the global batch.

        A_i = (r_i - mean(r)) / (std(r) + epsilon)
        over all sequences, each counted once for each of its tokens

    With the reward at the last token and no discount, every token's return is r_i. With `algorithm.gamma`
    below 1 or a KL in the reward, returns differ by token: see `PolicyWorker.token_advantages`. The deviation
    is the population's.
    tokens: int [B], loss tokens.
    """
    return whiten(rewards, tokens, epsilon=epsilon)


@estimator("reinforce_plus_plus_baseline", columns=("tokens",))
def reinforce_plus_plus_baseline(
    rewards: np.ndarray, groups: np.ndarray, *, tokens: np.ndarray, epsilon: float = EPSILON
) -> np.ndarray:
    """REINFORCE++ with the group's mean as baseline (Hu et al. 2025): normalised by the batch, not by the
    group.

        c_i = r_i - mean of the group(r)
        A_i = (c_i - mean(c)) / (std(c) + epsilon)      over all tokens

    tokens, token returns and deviation: see `reinforce_plus_plus`.
    """
    return whiten(dr_grpo(rewards, groups), tokens, epsilon=epsilon)


@estimator("remax", columns=("greedy_reward",), slope=_one)
def remax(
    rewards: np.ndarray, groups: np.ndarray, *, greedy_reward: np.ndarray
) -> np.ndarray:
    """ReMax (Li et al. 2024, algorithm 2): the reward of the greedy response to the same prompt is the
    baseline.

    A_i = r_i - r(greedy response to the prompt of i)
    """
    return np.asarray(rewards, np.float64) - greedy_reward


@estimator("opo", columns=("tokens",), slope=_one)
def opo(rewards: np.ndarray, groups: np.ndarray, *, tokens: np.ndarray) -> np.ndarray:
    """On-policy optimisation with the optimal reward baseline (Hao et al. 2025).

        A_i = r_i - sum_j l_j r_j / sum_j l_j      over the group of i, l the loss tokens

    The minimum-variance baseline if a response's squared gradient grows with its length.
    tokens: int [B], at least one in each group.
    """
    return rewards - _sum(tokens * rewards, groups) / _sum(tokens, groups)


@estimator("pass_at_k", options=("k",))
def pass_at_k(
    rewards: np.ndarray, groups: np.ndarray, *, k: int, epsilon: float = EPSILON
) -> np.ndarray:
    """Pass@k training (Chen et al. 2025): GRPO over all k-subsets S of the group, each rewarded by its best
    member.

        A_i = (E[max r_S | i in S] - E[max r_S]) / (std(max r_S) + epsilon)
        S uniform over the subsets of k

    In ascending order the j-th reward is the best of C(j-1, k-1) of C(n, k) subsets, and of C(j-2, k-2) of
    C(n-1, k-1) that contain an i < j. For rewards 0 and 1 this is the paper's analytical form. k = 1 is GRPO
    with the population's deviation. A group of at most k has advantage 0.
    """
    advantages = np.zeros(len(rewards))
    order = np.argsort(groups, kind="stable")
    for rows in np.split(order, np.flatnonzero(np.diff(groups[order])) + 1):
        if len(rows) > k:
            advantages[rows] = _pass_at_k_of_group(
                np.asarray(rewards, np.float64)[rows], k, epsilon
            )
    return advantages


def _pass_at_k_of_group(rewards: np.ndarray, k: int, epsilon: float) -> np.ndarray:
    n = len(rewards)
    order = np.argsort(rewards)
    ascending = rewards[order]
    best = np.array([comb(j, k - 1) / comb(n, k) for j in range(n)])
    mean = best @ ascending
    std = np.sqrt(best @ (ascending - mean) ** 2)
    own_weights = np.array([comb(i, k - 1) / comb(n - 1, k - 1) for i in range(n)])
    above = np.array(
        [comb(j - 1, k - 2) / comb(n - 1, k - 1) if j and k > 1 else 0.0 for j in range(n)]
    )
    from_above = np.append(np.cumsum((above * ascending)[::-1])[::-1][1:], 0.0)
    advantages = np.empty(n)
    advantages[order] = (own_weights * ascending + from_above - mean) / (std + epsilon)
    return advantages


@estimator("maxrl", slope=_per_mean)
def maxrl(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Maximum-likelihood reinforcement learning (Tajwar et al. 2026): the gradient of log pass rate, not of
    pass rate.

        A_i = (r_i - mean(r)) / mean(r)      over the group of i; 0 where mean(r) = 0

    A prompt counts by one over its pass rate. Raises DataError for a negative reward.
    """
    if np.min(rewards, initial=0.0) < 0:
        raise DataError(
            f"algorithm.advantage=maxrl takes rewards as rates of success, but one is {np.min(rewards)}. "
            "Let the reward function return no negative numbers"
        )
    mean = _mean(rewards, groups)
    return np.divide(rewards - mean, mean, out=np.zeros(len(rewards)), where=mean > 0)


def whiten(
    values: np.ndarray, weights: np.ndarray | None = None, *, epsilon: float = EPSILON
) -> np.ndarray:
    """Return (x - mean(x)) / (std(x) + epsilon) over the batch, with the population's deviation (n).

    weights: how often each value counts, such as its tokens.
    """
    mean = np.average(values, weights=weights)
    return (values - mean) / (
        np.sqrt(np.average((values - mean) ** 2, weights=weights)) + epsilon
    )


def has_signal(rewards: np.ndarray, uids: np.ndarray) -> np.ndarray:
    """True if the rewards of a sequence's group differ, bool [B]."""
    names, group = np.unique(uids, return_inverse=True)
    highest = np.full(len(names), -np.inf)
    lowest = np.full(len(names), np.inf)
    np.maximum.at(highest, group, rewards)
    np.minimum.at(lowest, group, rewards)
    return (highest > lowest)[group]


def share_without_signal(rewards: np.ndarray, uids: np.ndarray) -> float:
    """Return the share of groups whose rewards are all equal (TRL's `frac_reward_zero_std`)."""
    first = np.unique(uids, return_index=True)[1]
    return float(1 - has_signal(rewards, uids)[first].mean())


def adapted_kl_weight(
    coefficient: float, kl: float, sequences: int, settings: KlInRewardConfig
) -> float:
    """Weight of the next step's KL (Ziegler et al. 2019, section 2.2), with a gain of `sequences / horizon`:

        e = clip((KL - target) / target, -0.2, 0.2)        beta' = beta (1 + e sequences / horizon)

    kl: mean over the step's sequences, nats. Without a target the weight does not change.
    """
    if not settings.target:
        return coefficient
    error = (kl - settings.target) / settings.target
    error = min(max(error, -LARGEST_KL_ERROR), LARGEST_KL_ERROR)
    return coefficient * (1 + error * sequences / settings.horizon)


def sequence_advantages(
    algorithm: AlgorithmConfig,
    batch: RemoteBatch,
    rewards: np.ndarray,
    function: Callable[[Mapping[str, np.ndarray]], np.ndarray] | None = None,
) -> np.ndarray:
    """Return an advantage per row by `algorithm.advantage`, float32 [B]. A sample of several rows counts
    once.

    function: algorithm.advantage_function, of columns by name.
    """
    columns, sample = sample_columns(batch.with_columns(reward=rewards))
    if function is not None:
        return function(columns).astype(np.float32)[sample]
    options = {"normalize_by_std": algorithm.normalize_by_std, "k": algorithm.pass_k}
    return estimate(algorithm.advantage, columns, **options).astype(np.float32)[sample]


def sample_columns(batch: RemoteBatch) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Return the columns [S] of samples, as estimators and users' functions read them, and each row's sample
    [B].
    """
    first, sample = samples_of(batch)
    tokens = np.bincount(sample, batch["response_tokens"]).astype(np.int64)
    columns = {name: column[first] for name, column in batch.columns.items()}
    return columns | {
        "group": columns["group_number"],
        "tokens": tokens,
        "response_tokens": tokens,
    }, sample


def sequence_slopes(
    algorithm: AlgorithmConfig, batch: RemoteBatch, rewards: np.ndarray
) -> np.ndarray:
    """Return how much a row's advantage rises by its reward alone (`Estimator.slope`), float64 [B].

    Raises DataError for an estimator of another form.
    """
    estimator = ESTIMATORS.get(algorithm.advantage)
    if estimator is None or estimator.slope is None:
        names = ", ".join(name for name, candidate in ESTIMATORS.items() if candidate.slope)
        raise DataError(
            f"algorithm.advantage={algorithm.advantage}: an agent gave rewards to single responses, which "
            f"it cannot compare with those of whole sessions. Use one of {names}, or reward sessions alone."
        )
    first, sample = samples_of(batch)
    options = {"normalize_by_std": algorithm.normalize_by_std} if estimator.options else {}
    return estimator.slope(rewards[first], batch["group_number"][first], **options)[sample]


def samples_of(batch: RemoteBatch) -> tuple[np.ndarray, np.ndarray]:
    """Return the first row of each of S samples, int64 [S], and the sample of each row, int64 [B]."""
    numbers = batch.columns.get("sample_number", np.arange(len(batch)))
    return np.unique(numbers, return_index=True, return_inverse=True)[1:]


def value_metrics(metrics: Metrics) -> dict[str, float]:
    """Return a critic's metrics before its update, from merged `value_statistics`."""
    measured = results(metrics)
    explained = {"explained_variance": explained_variance(metrics)}
    return {name: measured[name] for name in ("values", "returns")} | explained


def _count(groups: np.ndarray) -> np.ndarray:
    return np.bincount(groups)[groups]


def _sum(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Sum over each group, repeated for each member."""
    return np.bincount(groups, weights=values)[groups]


def _mean(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    return _sum(values, groups) / _count(groups)


def _deviation(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The sample's (n - 1), repeated for each member."""
    squares = _sum((values - _mean(values, groups)) ** 2, groups)
    return np.sqrt(squares / np.maximum(_count(groups) - 1, 1))
