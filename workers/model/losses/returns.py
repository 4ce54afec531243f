"""Token rewards, and advantages and returns from them and a critic's values.

    reward of the sequence, at its last token, or of each turn, at the turn's \\
    KL to the reference, at every token                                       --token_rewards--> r_t
        PPO           r_t --gae, V_t--> A_t, R_t --whiten, all ranks--> A_t
        REINFORCE++   r_t --discounted_returns--> G_t --whiten, all ranks--> A_t

Runs on the rank that computed the values, so that the driver moves no tokens.

B sequences, N tokens with `loss_mask` of this rank's sequences, one sequence after another.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from workers.batch.dataproto import DataProto
from workers.errors import DataError
from workers.model.losses.kl import kl_estimate

EPSILON = 1e-6  # keeps equal advantages at 0


@dataclass(frozen=True)
class KlPenalty:
    """Penalise a token's reward by `coefficient` times its estimated KL to the reference, see
    `kl_estimate`.
    """

    coefficient: float
    estimator: str


def token_rewards(sequences: DataProto, penalty: KlPenalty | None = None) -> Tensor:
    """Return rewards of tokens, float64 [N] (Ziegler et al. 2019, eq. 2, token by token, and Ouyang et al.
    2022).

    r_t = - beta KL_t + (the reward at the last token of each turn, 0 elsewhere)        see `turns_of`
    """
    ends, earned = turns_of(sequences)
    rewards = torch.zeros(sequences.num_loss_tokens, dtype=torch.float64)
    if penalty is not None:
        rewards -= penalty.coefficient * token_kl(sequences, penalty.estimator)
    rewards[ends] += earned
    return rewards


def turns_of(sequences: DataProto) -> tuple[Tensor, Tensor]:
    """Return which of the N tokens end a turn, int64, and the turn's number, float64.

    Turns are the objects `by_turn`: pairs of (tokens, number) for each sequence. Without them, a sequence is
    one turn with the column `reward`.
    """
    counts = sequences.loss_token_counts
    some = counts > 0
    if "by_turn" not in sequences.objects:
        return counts.cumsum(0)[some] - 1, sequences.columns["reward"].double()[some]
    turns = [turn for row in sequences.objects["by_turn"][some.numpy()] for turn in row]
    tokens, numbers = torch.tensor(turns, dtype=torch.float64).reshape(-1, 2).T
    return tokens.long().cumsum(0) - 1, numbers


def discounts(sequences: DataProto, gamma: float, per: str) -> np.ndarray:
    """Return the discount between each token and the next, float64 [N]. per: `token`, or `turn`: 1 within a
    turn.
    """
    factors = np.full(sequences.num_loss_tokens, gamma if per == "token" else 1.0)
    factors[turns_of(sequences)[0].numpy()] = gamma
    return factors


def token_kl(sequences: DataProto, estimator: str) -> Tensor:
    """Return the estimated KL of the sampling policy to the reference at each token, nats, float64 [N]."""
    mask = sequences.tokens["loss_mask"]
    sampled, reference = (
        sequences.tokens[name][mask].double()
        for name in ("old_log_probs", "reference_log_probs")
    )
    return kl_estimate(reference - sampled, estimator)


def sequence_kl(sequences: DataProto, estimator: str) -> Tensor:
    """Return sums over sequences, float64 [B]."""
    owner = torch.repeat_interleave(
        torch.arange(len(sequences)), sequences.loss_token_counts
    )
    sums = torch.zeros(len(sequences), dtype=torch.float64)
    return sums.index_add(0, owner, token_kl(sequences, estimator))


def gae(
    rewards: np.ndarray,
    values: np.ndarray,
    lengths: np.ndarray,
    *,
    gamma: float | np.ndarray = 1.0,
    lam: float = 1.0,
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (Schulman et al. 2016, eqs. 11 to 16), token by token.

        delta_t = r_t + gamma V_{t+1} - V_t        A_t = delta_t + gamma lam A_{t+1}        R_t = A_t + V_t

    V and A are 0 after the last token. rewards, values: float [N], V_t before token t. lengths: int [B], may
    be 0.
    gamma: a number, or [N] of `discounts`.
    Returns (advantages, returns), float64 [N]. Raises DataError if sizes disagree.
    """
    if not len(rewards) == len(values) == lengths.sum():
        raise DataError(
            f"{len(rewards)} rewards and {len(values)} values for sequences of {lengths.sum()} tokens"
        )
    ends = np.cumsum(lengths)
    advantages = np.zeros(len(rewards))
    gamma = np.broadcast_to(gamma, len(rewards))
    next_value = np.zeros(len(lengths))
    next_advantage = np.zeros(len(lengths))
    # From the last token to the first, in all long enough sequences at once.
    for step in range(1, int(lengths.max(initial=0)) + 1):
        rows = np.flatnonzero(lengths >= step)
        t = ends[rows] - step
        delta = rewards[t] + gamma[t] * next_value[rows] - values[t]
        advantages[t] = next_advantage[rows] = delta + gamma[t] * lam * next_advantage[rows]
        next_value[rows] = values[t]
    return advantages, advantages + values


def discounted_returns(
    rewards: np.ndarray, lengths: np.ndarray, gamma: float | np.ndarray
) -> np.ndarray:
    """Return G_t = r_t + gamma G_{t+1}, 0 after the last token, float64 [N]: `gae` with values 0 and lambda
    1.

    The return of REINFORCE (Williams 1992), and of REINFORCE++ (Hu et al. 2025) if rewards include its KL
    penalty.
    """
    returns, _ = gae(rewards, np.zeros(len(rewards)), lengths, gamma=gamma)
    return returns


def whiten(
    values: Tensor,
    groups: Sequence[dist.ProcessGroup] = (),
    device: torch.device | str = "cpu",
    counted: Tensor | None = None,
) -> Tensor:
    """Return (x - mean(x)) / (std(x) + epsilon) over the values of all ranks, float64 [N].

    Uses two passes, because a variance from sums of squares loses digits if the mean is far from 0. The
    deviation is the population's (n), as in OpenRLHF (in verl the sample's, n - 1).
    groups: together the data-parallel ranks, which all call, or none for one process. device: where they add
    up sums.
    counted: bool [N], values that no other rank counts, or None for all.
    """
    values = values.double()
    once = torch.ones_like(values) if counted is None else counted.double()
    total, count = _over_ranks(
        torch.stack([(once * values).sum(), once.sum()]), groups, device
    )
    centred = values - total / count
    variance = _over_ranks((once * centred.square()).sum(), groups, device) / count
    return centred / (variance.sqrt() + EPSILON)


def _over_ranks(
    sums: Tensor, groups: Sequence[dist.ProcessGroup], device: torch.device | str
) -> Tensor:
    if not groups:
        return sums
    travelling = sums.to(device)
    for group in groups:
        dist.all_reduce(travelling, group=group)
    return travelling.to(sums.device)
