"""Advantages: from one reward a sequence to one advantage a sequence, on the driver.

Groups are found by `uid`; row order carries no meaning. B sequences, G groups.
"""

import numpy as np


def grpo(rewards: np.ndarray, uids: np.ndarray, *, normalize_by_std: bool = True, epsilon: float = 1e-6) -> np.ndarray:
    """Group-relative advantage (Shao et al. 2024, DeepSeekMath, section 4.1.2).

        A_i = (r_i - mean(r)) / (std(r) + epsilon)      over the group of i

    Without `normalize_by_std` it is the numerator alone (Liu et al. 2025, Dr. GRPO). The standard deviation is the
    sample's (n - 1), as in TRL and verl; a group of one has advantage 0.

    rewards: float [B]. uids: [B]. Returns float64 [B].
    """
    groups, index = np.unique(uids, return_inverse=True)
    count = np.bincount(index, minlength=len(groups))
    mean = np.bincount(index, weights=rewards) / count
    centred = rewards - mean[index]
    if not normalize_by_std:
        return centred
    variance = np.bincount(index, weights=centred**2) / np.maximum(count - 1, 1)
    return centred / (np.sqrt(variance)[index] + epsilon)


def has_signal(rewards: np.ndarray, uids: np.ndarray) -> np.ndarray:
    """Whether the rewards of a sequence's group differ at all: bool [B]. Without it every advantage is 0."""
    groups, index = np.unique(uids, return_inverse=True)
    highest = np.full(len(groups), -np.inf)
    lowest = np.full(len(groups), np.inf)
    np.maximum.at(highest, index, rewards)
    np.minimum.at(lowest, index, rewards)
    return (highest > lowest)[index]
