"""Credit: which turn of an episode earned which part of the sample's reward.

    rewards of a sample and its turns --r_k, one a turn--> by_row --> column `by_turn` --> tokens, on ranks
                                          '--gigpo: A_k--'

    algorithm.credit   r_k of a turn but the last         r_K, of the last
    episode            0                                  the sample's reward
    turn               what the environment gave for it   the rest, so that they add up to the sample's reward

All that belongs to the whole sample lies on its last turn: reward functions, a reward model,
reward.overlong_tokens, a group's baseline, and a KL by sequence. A KL by token stays at its token.

An agent's session may also have rewards of single responses, see `workers.agents.session`:

    rewards of sessions, offsets of turns --A + offset s--> column `by_turn` --> tokens, on ranks

S samples, B rows of a batch. A sample has several rows where `rollout.history=template` or an agent makes
them.
"""

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np

from controller.algorithm.advantages import (
    grpo,
    samples_of,
    sequence_advantages,
    sequence_slopes,
)
from controller.config.algorithm import AlgorithmConfig
from workers.batch.dataproto import object_column
from workers.batch.remote_batch import RemoteBatch
from workers.model.losses.returns import discounted_returns


def turn_rewards(
    algorithm: AlgorithmConfig, batch: RemoteBatch, rewards: np.ndarray
) -> np.ndarray:
    """Return pairs (tokens, r_k) of the turns of each row, or (tokens, A_k) with gigpo, objects [B].

    rewards: float [B], of the row's sample. batch: `credit` (see `Score`), `response_tokens` and
    `group_number`.
    """
    first, sample = samples_of(batch)
    tokens, environment_rewards, states = _turn_columns(batch["credit"][first])
    numbers = []
    for of_turns, reward in zip(environment_rewards, rewards[first].tolist(), strict=True):
        before_last = np.array(of_turns[:-1]) * (algorithm.credit == "turn")
        numbers.append(np.append(before_last, reward - before_last.sum()))
    if algorithm.advantage == "gigpo":
        if algorithm.gigpo.states == "number":
            states = tuple(range(len(of_turns)) for of_turns in numbers)
        numbers = gigpo(
            rewards[first],
            batch["group_number"][first],
            numbers,
            states,
            gamma=algorithm.gamma,
            weight=algorithm.gigpo.weight,
            normalize_by_std=algorithm.normalize_by_std,
        )
    return by_row(sample, batch["response_tokens"], tokens, numbers)


def _turn_columns(
    turns_of_samples: Iterable[Iterable[tuple[Any, ...]]],
) -> Iterator[tuple[Any, ...]]:
    """Return the first, second and third values of the turns: three sequences, with a tuple a sample."""
    columns_of_samples = [tuple(zip(*turns, strict=True)) for turns in turns_of_samples]
    return zip(*columns_of_samples, strict=True)


def has_offsets(batch: RemoteBatch) -> bool:
    """Whether an agent gave rewards to single responses. batch: perhaps `offsets`, objects [B] (see
    `Score.credit`).
    """
    return any(offset for row in batch.columns.get("offsets", ()) for _, offset, _ in row)


def session_advantages(
    algorithm: AlgorithmConfig, batch: RemoteBatch, rewards: np.ndarray
) -> np.ndarray:
    """Return pairs (tokens, A_k) of the turns of each row, objects [B]. Raises DataError as
    `sequence_slopes`.

        A_k = A + offset_k s, s = 1 / scale
        the mean over the leaves below turn k of (r_leaf - baseline) / scale

    A, baseline and scale: by algorithm.advantage from the sessions' rewards, float [B].
    """
    first, sample = samples_of(batch)
    slopes = sequence_slopes(algorithm, batch, rewards)[first]
    advantages = sequence_advantages(algorithm, batch, rewards)[first]
    tokens, offsets, _ = _turn_columns(batch["offsets"][first])
    numbers = [
        advantage + slope * np.array(turn_offsets)
        for advantage, slope, turn_offsets in zip(advantages, slopes, offsets, strict=True)
    ]
    return by_row(sample, batch["response_tokens"], tokens, numbers)


def gigpo(
    rewards: np.ndarray,
    groups: np.ndarray,
    of_turns: Sequence[np.ndarray],
    states: Sequence[Sequence[int]],
    *,
    gamma: float,
    weight: float,
    normalize_by_std: bool,
) -> list[np.ndarray]:
    """Group-in-group policy optimisation (Feng et al. 2025, arXiv 2505.10978, eqs. 3 to 8): A_k of each
    sample.

        G_k = r_k + gamma G_{k+1}
        A_k = A(reward; group of the sample) + weight A(G_k; turns of equal state)

    A is `grpo`'s, with the deviation or without. Equal states are of the same group of samples, and a state
    that occurs once has A = 0. As in verl-agent, a state is what the environment said last, without the
    history.
    rewards: float [S]. groups: int [S]. of_turns: r_k. states: int, of each turn.
    """
    counts = np.array([len(turns) for turns in of_turns])
    sample = np.repeat(np.arange(len(counts)), counts)
    returns = discounted_returns(np.concatenate(of_turns), counts, gamma)
    keys = np.stack(
        [groups[sample], np.fromiter(itertools.chain.from_iterable(states), np.int64)]
    )
    equal_states = np.unique(keys, axis=1, return_inverse=True)[1].reshape(-1)
    of_sample = grpo(rewards, groups, normalize_by_std=normalize_by_std)
    of_turn = grpo(returns, equal_states, normalize_by_std=normalize_by_std)
    advantages = of_sample[sample] + weight * of_turn
    return np.split(advantages, counts.cumsum()[:-1])


def by_row(
    sample: np.ndarray,
    row_tokens: np.ndarray,
    tokens: Sequence[Sequence[int]],
    numbers: Sequence[np.ndarray],
) -> np.ndarray:
    """Deal the turns of samples to their rows, in order: pairs (tokens, number), objects [B].

    sample, row_tokens: int [B], of each row, trained tokens alone. tokens, numbers: of the turns of each
    sample.
    """
    turns = [iter(zip(*pair, strict=True)) for pair in zip(tokens, numbers, strict=True)]
    rows = []
    for owner, budget in zip(sample.tolist(), row_tokens.tolist(), strict=True):
        row = []
        while budget > 0:
            row.append(next(turns[owner]))
            budget -= row[-1][0]
        rows.append(tuple(row))
    return object_column(rows)
