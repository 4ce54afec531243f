"""Advantages from rewards, float64, written as in the papers.

    Samples --ESTIMATORS[name]--> one advantage a sample

S samples. Formulas, references and the spelling of each name: `controller.algorithm.advantages`.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from ballast.audit.bundle import MissingError

EPSILONS = (1e-6, 1e-4, 1e-8, 0.0)
"""What trainers add to a standard deviation: verl and Ballast, TRL, OpenRLHF."""


@dataclass(frozen=True)
class Samples:
    """Columns [S]. group: numbered from 0. tokens: loss tokens of each."""

    rewards: np.ndarray
    group: np.ndarray
    tokens: np.ndarray
    greedy_rewards: np.ndarray | None = None
    epsilon: float = EPSILONS[0]

    def with_rewards(self, rewards: np.ndarray) -> "Samples":
        return replace(self, rewards=rewards)

    def with_group(self, group: np.ndarray) -> "Samples":
        return replace(self, group=np.unique(group, return_inverse=True)[1])


def group_sums(samples: Samples, values: np.ndarray) -> np.ndarray:
    """Return the sum of each sample's group, float64 [S]."""
    return np.bincount(samples.group, values)[samples.group]


def group_counts(samples: Samples) -> np.ndarray:
    return np.bincount(samples.group)[samples.group]


def group_mean(samples: Samples) -> np.ndarray:
    return group_sums(samples, samples.rewards) / group_counts(samples)


def group_deviation(samples: Samples, subtracted: int) -> np.ndarray:
    """Return the standard deviation of each sample's group. subtracted: 1 for the sample's, 0 for the
    population's.
    """
    squares = group_sums(samples, (samples.rewards - group_mean(samples)) ** 2)
    return np.sqrt(squares / np.maximum(group_counts(samples) - subtracted, 1))


def centred(samples: Samples) -> np.ndarray:
    return samples.rewards - group_mean(samples)


def per_deviation(
    samples: Samples, values: np.ndarray, deviation: np.ndarray
) -> np.ndarray:
    """Divide by deviation + epsilon, 0 for 0 / 0."""
    divisor = deviation + samples.epsilon
    return np.divide(values, divisor, out=np.zeros(len(values)), where=divisor > 0)


def grpo(samples: Samples) -> np.ndarray:
    return per_deviation(samples, centred(samples), group_deviation(samples, 1))


def grpo_population_std(samples: Samples) -> np.ndarray:
    return per_deviation(samples, centred(samples), group_deviation(samples, 0))


def grpo_batch_std(samples: Samples) -> np.ndarray:
    """Compare with the group, scale by the batch (TRL: scale_rewards=batch)."""
    deviation = np.std(samples.rewards, ddof=1) if len(samples.rewards) > 1 else 0.0
    return per_deviation(
        samples, centred(samples), np.full(len(samples.rewards), deviation)
    )


def rloo(samples: Samples) -> np.ndarray:
    count = group_counts(samples)
    return centred(samples) * count / np.maximum(count - 1, 1)


def batch(samples: Samples, subtracted: int = 1) -> np.ndarray:
    values = samples.rewards - samples.rewards.mean()
    deviation = (
        np.std(samples.rewards, ddof=subtracted) if len(values) > subtracted else 0.0
    )
    return per_deviation(samples, values, np.full(len(values), deviation))


def batch_population_std(samples: Samples) -> np.ndarray:
    return batch(samples, subtracted=0)


def whiten(samples: Samples, values: np.ndarray, subtracted: int = 0) -> np.ndarray:
    """Normalise over the batch, each sample counted once for each of its tokens."""
    weights = samples.tokens.astype(np.float64)
    total = weights.sum()
    if not total:
        return np.zeros(len(values))
    mean = values @ weights / total
    variance = (values - mean) ** 2 @ weights / max(total - subtracted, 1)
    return per_deviation(samples, values - mean, np.full(len(values), np.sqrt(variance)))


def reinforce_plus_plus(samples: Samples) -> np.ndarray:
    return whiten(samples, samples.rewards)


def reinforce_plus_plus_sample_std(samples: Samples) -> np.ndarray:
    return whiten(samples, samples.rewards, subtracted=1)


def reinforce_plus_plus_baseline(samples: Samples) -> np.ndarray:
    return whiten(samples, centred(samples))


def opo(samples: Samples) -> np.ndarray:
    tokens = group_sums(samples, samples.tokens.astype(np.float64))
    weighted = group_sums(samples, samples.tokens * samples.rewards)
    return samples.rewards - weighted / np.maximum(tokens, 1)


def remax(samples: Samples) -> np.ndarray:
    if samples.greedy_rewards is None:
        raise MissingError("greedy_rewards")
    return samples.rewards - samples.greedy_rewards


def maxrl(samples: Samples) -> np.ndarray:
    mean = group_mean(samples)
    return np.divide(centred(samples), mean, out=np.zeros(len(mean)), where=mean > 0)


def rewards_alone(samples: Samples) -> np.ndarray:
    return samples.rewards


def zero(samples: Samples) -> np.ndarray:
    return np.zeros(len(samples.rewards))


ESTIMATORS: dict[str, Callable[[Samples], np.ndarray]] = {
    "grpo": grpo,
    "grpo_population_std": grpo_population_std,
    "grpo_batch_std": grpo_batch_std,
    "dr_grpo": centred,
    "rloo": rloo,
    "batch": batch,
    "batch_population_std": batch_population_std,
    "reinforce_plus_plus": reinforce_plus_plus,
    "reinforce_plus_plus_sample_std": reinforce_plus_plus_sample_std,
    "reinforce_plus_plus_baseline": reinforce_plus_plus_baseline,
    "opo": opo,
    "remax": remax,
    "maxrl": maxrl,
    "reinforce": rewards_alone,
    "none": zero,
}
"""By the name in `algorithm.estimator`. `_population_std` and REINFORCE++ divide by n, others by n - 1."""
SCALE_FREE = ("dr_grpo", "rloo", "opo", "remax", "maxrl", "reinforce", "none")
"""Estimators without a standard deviation, to which epsilon is nothing."""
