"""Build from `LossConfig` the function that the engine calls for every micro-batch.

    Predictions --policy loss--> [N] --* rollout correction--> + KL - entropy --aggregate--> loss

A custom loss is decorated with `policy_loss`, and with `per_sequence_loss` to see whole sequences
(docs/your-own.md). Ratios are r_t = pi(y_t) / pi_old(y_t).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from workers.batch.dataproto import CONTEXT_DEGREE, DataProto
from workers.config.loss import DistillationConfig, check_policy_loss, undecorated_error
from workers.config.roles import LossConfig
from workers.errors import ConfigError, DataError, quote
from workers.model.losses.aggregation import Denominators, aggregate
from workers.model.losses.correction import correction_weights, rollout_mismatch
from workers.model.losses.kl import bounded_exp, kl_estimate, kl_of_loss
from workers.model.losses.predictions import (
    Predictions,
    Statistic,
    Statistics,
    joined,
    mean,
    total,
)
from workers.user_code.functions import load

OPTIMIZER_METRICS = ("grad_norm", "learning_rate", "skipped_steps")
CONFIGURED_STATISTICS = ("loss", "entropy", "reference_kl", "teacher_divergence")
RESERVED_STATISTICS = (*CONFIGURED_STATISTICS, *OPTIMIZER_METRICS)
"""Metrics of every policy. A loss's statistic of the same name would replace them, or be replaced."""


def log_ratio_to_old(predictions: Predictions) -> Tensor:
    """Return log r_t, [N], with gradient. Without `old_log_probs`, r_t = 1: exact for the only update on a
    batch.
    """
    return predictions.log_probs - predictions["old_log_probs"]


def ratio_to_old(predictions: Predictions) -> Tensor:
    return bounded_exp(log_ratio_to_old(predictions))


def clip(ratio: Tensor, config: LossConfig) -> Tensor:
    return ratio.clamp(1 - config.clip_low, 1 + config.clip_high)


def ratio_statistics(log_ratio: Tensor, clipped: Tensor) -> Statistics:
    """clipped: bool [N], tokens without gradient."""
    return {
        "clip_fraction": mean(clipped.to(log_ratio.dtype)),
        "approximate_kl": mean(kl_estimate(-log_ratio.detach(), "k3")),
    }


TokenLosses = Callable[[Predictions, LossConfig], tuple[Tensor, Statistics]]
LossFunction = Callable[[Predictions, Denominators], tuple[Tensor, Statistics]]
"""Returns a micro-batch's SUM, divided by the mini-batch's denominators, and statistics."""


Preparation = Callable[
    [Sequence[DataProto], Denominators, LossConfig, Sequence[dist.ProcessGroup]],
    list[DataProto],
]


@dataclass(frozen=True)
class PolicyLoss:
    function: TokenLosses
    aggregation: str
    prepare: Preparation | None = None


POLICY_LOSSES: dict[str, PolicyLoss] = {}


def policy_loss(
    name: str, *, aggregation: str, prepare: Preparation | None = None
) -> Callable[[TokenLosses], TokenLosses]:
    """Register a policy loss under the name that `algorithm.loss.name` selects.

    aggregation: its normaliser, one of `token_weights`, for the setting `auto`. prepare: for losses that need
    the whole mini-batch, called on every rank with its micro-batches before the first forward pass. Returns
    them with columns.
    """

    def register(function: TokenLosses) -> TokenLosses:
        POLICY_LOSSES[name] = PolicyLoss(function, aggregation, prepare)
        return function

    return register


def per_sequence_loss(function: TokenLosses) -> TokenLosses:
    """Call a policy loss with whole sequences (`Predictions` of one sequence, N its predicted tokens).

    It returns token losses [N], or a 0-d loss, which is repeated at each token.
    """

    def packed(predictions: Predictions, config: LossConfig) -> tuple[Tensor, Statistics]:
        losses = [predictions.log_probs[:0]]
        statistics = []
        for sequence in predictions.sequences():
            loss, parts = _losses_and_statistics(function(sequence, config))
            losses.append(loss.expand(len(sequence)))
            statistics.append(parts)
        return torch.cat(losses), joined(statistics)

    return packed


def make_policy_loss(config: LossConfig) -> "PolicyObjective":
    """Return the loss of `config`.

    Raises ConfigError if no loss has that name, or a setting of `config` is invalid or has no effect for it.
    """
    check_policy_loss(config)
    if config.name == "custom":
        return PolicyObjective(_custom(config.function), config)
    if config.name not in POLICY_LOSSES:
        raise ConfigError(
            f"algorithm.loss.name={config.name} is not a policy loss. Known are custom and "
            f"{sorted(POLICY_LOSSES)}."
        )
    return PolicyObjective(POLICY_LOSSES[config.name], config)


@dataclass(frozen=True)
class PolicyObjective:
    """Combine a policy loss with rollout correction, KL to the reference, entropy, distillation and
    aggregation.

        loss = sum_t weight_t (c_t L_t + c_kl KL_t - c_entropy H_t + c_distillation D_t)

    L_t: the registered loss, c_t: see `correction_weights`, KL_t: see `kl_of_loss`, H_t: entropy in nats,
    D_t: see `linear_divergence`, weight_t: see `token_weights`. Over sampled tokens alone, L_t is the
    registered loss plus c_distillation r_t (log pi(y_t) - log teacher(y_t)), whose second factor has no
    gradient (Lu et al. 2025, thinkingmachines.ai/blog/on-policy-distillation).

    Needs `reference_log_probs` if kl_coefficient > 0, and the columns of the loss.
    """

    loss: PolicyLoss
    config: LossConfig

    @property
    def distillation(self) -> DistillationConfig:
        return self.config.distillation

    @property
    def reads_hidden(self) -> bool:
        return self.config.hidden_states

    @property
    def aggregation(self) -> str:
        return (
            self.loss.aggregation
            if self.config.aggregation == "auto"
            else self.config.aggregation
        )

    def __call__(
        self, predictions: Predictions, denominators: Denominators
    ) -> tuple[Tensor, Statistics]:
        config = self.config
        losses, statistics = _losses_and_statistics(self.loss.function(predictions, config))
        _check_result(losses, statistics, predictions, config.function or config.name)
        statistics = statistics | {
            "entropy": mean(predictions.entropy),
            **rollout_mismatch(predictions),
        }
        taught = config.distillation
        if taught.coefficient and taught.over == "token":
            distance = (predictions.log_probs - predictions["teacher_log_probs"]).detach()
            losses = losses + taught.coefficient * ratio_to_old(predictions) * distance
            statistics["teacher_divergence"] = mean(distance)
        weights, corrections = correction_weights(predictions, config.rollout_correction)
        if weights is not None:
            losses = losses * weights
        if config.entropy_coefficient:
            losses = losses - config.entropy_coefficient * predictions.entropy
        if config.kl_coefficient or "reference_log_probs" in predictions.columns:
            log_ratio = predictions["reference_log_probs"] - predictions.log_probs
            kl = kl_of_loss(
                log_ratio,
                ratio_to_old(predictions),
                config.kl_estimator,
                config.kl_correction,
            )
            losses = losses + config.kl_coefficient * kl
            statistics["reference_kl"] = mean(kl)
        if taught.compares_distributions:
            assert predictions.divergence is not None
            losses = losses + taught.coefficient * predictions.divergence
            statistics["teacher_divergence"] = mean(predictions.divergence)
        loss = aggregate(
            losses, predictions, denominators, self.aggregation, config.constant_length
        )
        return loss, {"loss": total(loss), **statistics, **corrections}


def _losses_and_statistics(result: object) -> tuple[Tensor, Statistics]:
    """Raise DataError unless a loss returned a tensor and a dictionary."""
    match result:
        case (Tensor() as losses, Mapping() as statistics):
            return losses, dict(statistics)
        case (first, second):
            text = f"a pair of {type(first).__name__} and {type(second).__name__}"
        case _:
            text = f"a {type(result).__name__}" if result is not None else "None"
    raise DataError(
        f"the loss returned {text}. Return a tensor of losses and a dictionary of statistics."
    )


def _check_result(
    losses: Tensor, statistics: Statistics, predictions: Predictions, name: str
) -> None:
    """Raise DataError unless there is a loss for each token, and a statistic under each name."""
    if losses.shape != predictions.log_probs.shape:
        raise DataError(
            f"policy loss {name} gave losses of shape {tuple(losses.shape)} for {len(predictions)} tokens. "
            "It must give one a token."
        )
    for key, statistic in statistics.items():
        if not isinstance(statistic, Statistic):
            raise DataError(
                f"policy loss {name} gave the statistic {quote(key)} as {type(statistic).__name__}. "
                "Wrap it by mean(values) or total(value) of workers.model.losses."
            )
        if key in RESERVED_STATISTICS:
            raise DataError(
                f"policy loss {name} gave the statistic {key!r}, a metric of every policy. Rename it."
            )
        if not isinstance(key, str):
            raise DataError(
                f"policy loss {name} gave a statistic named {quote(key)}. Name it by a text."
            )


def prepare(
    loss_function: Callable[..., tuple[Tensor, Statistics]],
    parts: Sequence[DataProto],
    denominators: Denominators,
    groups: Sequence[dist.ProcessGroup] = (),
) -> Sequence[DataProto]:
    """Return this rank's micro-batches with the columns that the loss adds. See `hold_back`."""
    if (
        isinstance(loss_function, PolicyObjective)
        and loss_function.loss.prepare is not None
    ):
        if any(CONTEXT_DEGREE in part.columns for part in parts):
            raise ConfigError(
                "policy.parallel.context_parallel_degree=auto: does not work with losses that prepare a "
                "mini-batch. Set fixed."
            )
        return loss_function.loss.prepare(parts, denominators, loss_function.config, groups)
    return parts


def _custom(path: str) -> PolicyLoss:
    place, _, name = path.rpartition(":")
    if place.endswith(".py"):
        return _of_file(str(Path(place).resolve()), name)
    return _registered(path)


@cache
def _of_file(file: str, name: str) -> PolicyLoss:
    return _registered(f"{file}:{name}")


def _registered(path: str) -> PolicyLoss:
    function = load("algorithm.loss.function", path)[1]
    for loss in POLICY_LOSSES.values():
        if loss.function is function:
            return loss
    raise undecorated_error(path)
