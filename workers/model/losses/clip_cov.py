"""Clip-Cov and KL-Cov (Cui et al. 2025, "The Entropy Mechanism"): hold back the few tokens that lower entropy
most.

    mini-batch of this rank --covariance of every token--> rarest few of ALL ranks --> `held_back` --> loss

The policy's entropy falls with the covariance of log-prob and advantage. A token's part of it is

    Cov_t = (log pi(y_t) - mean log pi) (A_t - mean A)          means over the N tokens of the mini-batch

`hold_back` runs before the first forward pass, because the choice depends on the whole mini-batch. It takes
log pi from `old_log_probs` (the paper: the current policy, the same at the first update of a batch).
Randomness is a hash of the token's own numbers, so that order and plan do not change the choice.

T tokens of this rank's share of the mini-batch, N loss tokens over all ranks.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor

from workers.batch.dataproto import DataProto
from workers.config.roles import LossConfig
from workers.errors import DataError
from workers.model.losses.aggregation import Denominators
from workers.model.losses.kl import bounded_exp
from workers.model.losses.predictions import Predictions, Statistics, mean
from workers.model.losses.ratio_losses import surrogate
from workers.model.losses.registry import log_ratio_to_old, policy_loss, ratio_statistics


def hold_back(
    parts: Sequence[DataProto],
    denominators: Denominators,
    config: LossConfig,
    groups: Sequence[dist.ProcessGroup] = (),
) -> list[DataProto]:
    """Return this rank's micro-batches with the column `held_back`, bool [T]: the tokens treated separately.

        clip_cov   covariance_fraction * N tokens, drawn from those with clip_cov_low < Cov_t < clip_cov_high
        kl_cov     the covariance_fraction * N tokens with the highest Cov_t, of those with Cov_t > 0

    At least one candidate is chosen, and all ties with the last one. groups: together the data-parallel
    ranks, all of which call, or none for one process. Raises DataError without `old_log_probs` or
    `advantages`.
    """
    masks = [part.tokens["loss_mask"] for part in parts]
    log_probs = _loss_tokens(parts, masks, "old_log_probs")
    advantages = _loss_tokens(parts, masks, "advantages")
    covariance = _covariance(log_probs, advantages, denominators.tokens, groups)
    if config.name == "clip_cov":
        priority = _hash(
            torch.stack([log_probs, advantages, _loss_positions(parts, masks)])
        )
        candidates = (covariance > config.clip_cov_low) & (
            covariance < config.clip_cov_high
        )
    else:
        priority = covariance
        candidates = covariance > 0
    count = max(1, int(config.covariance_fraction * denominators.tokens))
    line = _smallest_of_highest(priority[candidates], count, groups)
    chosen = candidates & (priority >= line)
    chosen_parts = chosen.split([int(mask.sum()) for mask in masks])
    return [
        _with_column(part, mask, chosen_part)
        for part, mask, chosen_part in zip(parts, masks, chosen_parts, strict=True)
    ]


@policy_loss("clip_cov", aggregation="token_mean", prepare=hold_back)
def clip_cov(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Clip-Cov (Cui et al. 2025): no gradient from the tokens that `hold_back` drew.

    L_t = 0 for a drawn token, else the clipped surrogate of `ppo_clip`
    """
    losses, clipped, log_ratio = surrogate(predictions, config)
    held_back = predictions["held_back"]
    statistics = ratio_statistics(log_ratio, clipped) | {
        "held_back_fraction": mean(held_back.to(losses.dtype))
    }
    return losses.masked_fill(held_back, 0.0), statistics


@policy_loss("kl_cov", aggregation="token_mean", prepare=hold_back)
def kl_cov(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
    """KL-Cov (Cui et al. 2025): penalise the distance to the old policy for the tokens that `hold_back`
    chose.

        L_t = -r_t A_t + kl_cov_coefficient |log r_t| for a chosen token, else -r_t A_t

    The absolute log-ratio stands for the KL, as in the authors' code.
    """
    log_ratio = log_ratio_to_old(predictions)
    held_back = predictions["held_back"]
    losses = -bounded_exp(log_ratio) * predictions["advantages"]
    penalty = config.kl_cov_coefficient * log_ratio.abs()
    statistics = ratio_statistics(log_ratio, torch.zeros_like(held_back))
    del statistics["clip_fraction"]
    statistics["held_back_fraction"] = mean(held_back.to(losses.dtype))
    return losses + torch.where(held_back, penalty, 0.0), statistics


def _covariance(
    log_probs: Tensor,
    advantages: Tensor,
    tokens: float,
    groups: Sequence[dist.ProcessGroup],
) -> Tensor:
    means = torch.stack([log_probs.sum(), advantages.sum()]) / tokens
    for group in groups:
        dist.all_reduce(means, group=group)
    return (log_probs - means[0]) * (advantages - means[1])


def _smallest_of_highest(
    values: Tensor, count: int, groups: Sequence[dist.ProcessGroup]
) -> Tensor:
    """Return the count-th highest value over all ranks, 0-d: the lowest if fewer, infinity if none."""
    highest = torch.cat([values, values.new_full((count,), -torch.inf)]).topk(count).values
    for group in groups:
        gathered = [torch.empty_like(highest) for _ in range(group.size())]
        dist.all_gather(gathered, highest, group=group)
        highest = torch.cat(gathered).topk(count).values
    real = highest[highest > -torch.inf]
    return real[-1] if len(real) else values.new_tensor(torch.inf)


def _hash(numbers: Tensor) -> Tensor:
    """Hash float64 columns [K, M] to uniform [0, 1), float64 [M]: the finaliser of splitmix64 (Steele et al.
    2014).
    """
    state = torch.zeros_like(numbers[0], dtype=torch.int64)
    for bits in numbers.view(torch.int64):
        state = state + bits - 0x61C8864680B583EB
        state = (state ^ _shift_right(state, 30)) * -0x40A7B892E31B1A47
        state = (state ^ _shift_right(state, 27)) * -0x6B2FB644ECCEEE15
        state = state ^ _shift_right(state, 31)
    return _shift_right(state, 11).double() * 2.0**-53


def _shift_right(bits: Tensor, places: int) -> Tensor:
    return (bits >> places) & ((1 << (64 - places)) - 1)


def _loss_tokens(parts: Sequence[DataProto], masks: Sequence[Tensor], name: str) -> Tensor:
    return torch.cat(
        [
            _token_column(part, name)[mask].double()
            for part, mask in zip(parts, masks, strict=True)
        ]
    )


def _token_column(part: DataProto, name: str) -> Tensor:
    if name in part.tokens:
        return part.tokens[name]
    if name in part.columns:
        return part.columns[name].repeat_interleave(
            part.lengths.to(part.columns[name].device)
        )
    raise DataError(
        f"the loss needs the column {name!r}. The batch has {sorted(part.tokens | part.columns)}."
    )


def _loss_positions(parts: Sequence[DataProto], masks: Sequence[Tensor]) -> Tensor:
    positions = []
    for part, mask in zip(parts, masks, strict=True):
        starts = torch.from_numpy(part.offsets)[part.owner]
        positions.append(
            (torch.arange(len(starts)) - starts).to(mask.device, torch.float64)[mask]
        )
    return torch.cat(positions)


def _with_column(part: DataProto, mask: Tensor, chosen: Tensor) -> DataProto:
    held_back = torch.zeros_like(mask).masked_scatter(mask, chosen)
    return replace(part, tokens=part.tokens | {"held_back": held_back})
