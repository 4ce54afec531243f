"""Policy losses that do not depend on how a mini-batch is cut.

    Predictions of one micro-batch --loss function + Denominators of the mini-batch--> (loss, statistics)

A loss function returns the micro-batch's SUM already divided by the mini-batch's global denominators. The sum of these
over micro-batches and ranks is the loss, and the sum of their gradients its gradient, however the batch was cut.

N predicted tokens and B sequences of the micro-batch.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from workers.config import LossConfig
from workers.errors import ConfigError, DataError
from workers.metrics import Metric, Metrics, Reduction, merge
from workers.model.packing import PackedRow, Sequences


@dataclass(frozen=True)
class Denominators:
    """Counts of the whole mini-batch, over all micro-batches and ranks, known before the first forward pass.

    tokens: tokens with `loss_mask`; sequences: sequences with at least one of them. Raises DataError unless positive.
    """

    tokens: float
    sequences: float

    def __post_init__(self) -> None:
        if self.tokens <= 0 or self.sequences <= 0:
            raise DataError(
                f"a mini-batch has {self.tokens} loss tokens in {self.sequences} sequences: nothing to learn"
            )

    @classmethod
    def of(cls, sequences: Sequences) -> "Denominators":
        """Those of a mini-batch that one process holds as a whole."""
        owner = torch.repeat_interleave(torch.arange(len(sequences)), sequences.lengths)
        loss_mask = sequences.tokens["loss_mask"].cpu()
        return cls(sequences.num_loss_tokens, len(owner[loss_mask].unique()))


@dataclass(frozen=True)
class Predictions:
    """What the model says of the N predicted tokens of a micro-batch, beside the columns at the same tokens.

    log_probs, entropy: float32 [N], with gradient. columns: name -> [N]; per-sequence columns repeat on each token.
    sequence_tokens: float32 [N], number of predicted tokens in the sequence that each token belongs to.
    """

    log_probs: Tensor
    entropy: Tensor
    columns: dict[str, Tensor]
    sequence_tokens: Tensor

    @classmethod
    def gather(cls, log_probs: Tensor, entropy: Tensor, sequences: Sequences, row: PackedRow) -> "Predictions":
        """Join the model's outputs [N] with the columns of the micro-batch `sequences` that `row` was packed from."""
        device, owner = log_probs.device, row.sequence_index
        columns = {name: values[owner].to(device) for name, values in sequences.columns.items()}
        columns |= {name: values[row.loss_positions].to(device) for name, values in sequences.tokens.items()}
        counts = torch.bincount(owner, minlength=len(sequences))
        return cls(log_probs, entropy, columns, counts[owner].to(device, log_probs.dtype))

    def __getitem__(self, name: str) -> Tensor:
        """A column [N]. Raises DataError if the batch does not have it."""
        if name not in self.columns:
            raise DataError(f"the loss needs the column {name!r}; the batch has {sorted(self.columns)}")
        return self.columns[name]


@dataclass(frozen=True)
class Statistic:
    """A metric still on the device: `value` is 0-d; `weight` as in `Metric`."""

    reduction: Reduction
    value: Tensor
    weight: float = 0.0


Statistics = dict[str, Statistic]
LossFunction = Callable[[Predictions, Denominators], tuple[Tensor, Statistics]]
PolicyLoss = Callable[[Predictions, Denominators, LossConfig], tuple[Tensor, Statistics]]

POLICY_LOSSES: dict[str, PolicyLoss] = {}


def policy_loss(name: str) -> Callable[[PolicyLoss], PolicyLoss]:
    """Register a policy loss under the name that `algorithm.loss.name` selects."""

    def register(function: PolicyLoss) -> PolicyLoss:
        POLICY_LOSSES[name] = function
        return function

    return register


def make_policy_loss(config: LossConfig) -> LossFunction:
    """The registered loss with its settings bound. Raises ConfigError if no loss has that name."""
    if config.name not in POLICY_LOSSES:
        raise ConfigError(f"algorithm.loss.name={config.name} is not a policy loss; known are {sorted(POLICY_LOSSES)}")
    function = POLICY_LOSSES[config.name]
    return lambda predictions, denominators: function(predictions, denominators, config)


@policy_loss("ppo_clip")
def ppo_clip(predictions: Predictions, denominators: Denominators, config: LossConfig) -> tuple[Tensor, Statistics]:
    """Clipped surrogate (Schulman et al. 2017, eq. 7) with separate bounds, entropy bonus and KL to a reference.

        r_t = exp(log_prob_t - old_log_prob_t)
        L_t = -min(r_t A_t, clip(r_t, 1 - clip_low, 1 + clip_high) A_t) - c_entropy H_t + c_kl KL_t

    Without `old_log_probs` the policy before the update is taken as old, r_t = 1: exact for the first and only update
    on a batch, and one forward pass cheaper. Needs `advantages`, and `reference_log_probs` if kl_coefficient > 0.
    """
    log_probs, advantages = predictions.log_probs, predictions["advantages"]
    old_log_probs = predictions.columns.get("old_log_probs", log_probs.detach())
    log_ratio = log_probs - old_log_probs
    ratio = log_ratio.exp()
    unclipped = ratio * advantages
    clipped = ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * advantages
    losses = -torch.minimum(unclipped, clipped)
    statistics = {
        "clip_fraction": mean((clipped < unclipped).to(ratio.dtype)),
        "approximate_kl": mean(kl_estimate(-log_ratio.detach(), "k3")),
        "entropy": mean(predictions.entropy),
        **rollout_mismatch(predictions),
    }
    if config.entropy_coefficient:
        losses = losses - config.entropy_coefficient * predictions.entropy
    if "reference_log_probs" in predictions.columns or config.kl_coefficient:
        kl = kl_estimate(predictions["reference_log_probs"] - log_probs, config.kl_estimator)
        losses = losses + config.kl_coefficient * kl
        statistics["reference_kl"] = mean(kl)
    loss = (losses * token_weights(predictions, denominators, config.aggregation)).sum()
    return loss, {"loss": total(loss), **statistics}


def sft(predictions: Predictions, denominators: Denominators) -> tuple[Tensor, Statistics]:
    """Negative log-likelihood of the tokens with `loss_mask`, mean over the tokens of the mini-batch."""
    loss = -predictions.log_probs.sum() / denominators.tokens
    return loss, {"loss": total(loss), "entropy": mean(predictions.entropy)}


def kl_estimate(log_ratio: Tensor, estimator: str) -> Tensor:
    """Estimates of KL(p || q) from samples of p, with log_ratio = log q - log p (Schulman 2020, "Approximating KL").

        k1 = -log_ratio        k2 = log_ratio^2 / 2        k3 = exp(log_ratio) - 1 - log_ratio

    k1 is unbiased and noisy, k2 biased and quiet, k3 unbiased, quiet and never negative. As a loss term, k1 has a
    gradient of mean zero under the policy's own samples: use it to watch, not to hold the policy near its reference.
    """
    if estimator == "k1":
        return -log_ratio
    if estimator == "k2":
        return 0.5 * log_ratio.square()
    if estimator == "k3":
        return log_ratio.expm1() - log_ratio
    raise ConfigError(f"algorithm.loss.kl_estimator={estimator} is not one of k1, k2, k3")


def token_weights(predictions: Predictions, denominators: Denominators, aggregation: str) -> Tensor:
    """Weight of each token's loss [N], so that the aggregate is their weighted sum over the whole mini-batch.

    token_mean                1 / tokens
    sequence_mean_token_mean  1 / (sequences * tokens of its sequence)
    sequence_mean_token_sum   1 / sequences
    """
    ones = torch.ones_like(predictions.sequence_tokens)
    if aggregation == "token_mean":
        return ones / denominators.tokens
    if aggregation == "sequence_mean_token_mean":
        return ones / (denominators.sequences * predictions.sequence_tokens)
    if aggregation == "sequence_mean_token_sum":
        return ones / denominators.sequences
    raise ConfigError(f"algorithm.loss.aggregation={aggregation} is not a known aggregation")


def rollout_mismatch(predictions: Predictions) -> Statistics:
    """How far the log-probs that the rollout engine reported lie from the trainer's, where the batch has them."""
    if "rollout_log_probs" not in predictions.columns:
        return {}
    difference = (predictions["rollout_log_probs"] - predictions.log_probs.detach()).abs()
    statistics = {"rollout_mismatch_mean": mean(difference)}
    if len(difference):
        statistics["rollout_mismatch_max"] = Statistic(Reduction.MAX, difference.max())
    return statistics


def total(value: Tensor) -> Statistic:
    """Adds up over micro-batches and ranks."""
    return Statistic(Reduction.SUM, value.detach())


def mean(values: Tensor) -> Statistic:
    """Mean over tokens [N], weighted by their number when joined with those of other micro-batches."""
    return Statistic(Reduction.MEAN, values.detach().sum(), len(values))


def to_metrics(parts: Iterable[Mapping[str, Statistic]]) -> Metrics:
    """Join the statistics of micro-batches, with one copy from the device for all of them."""
    named = [(name, statistic) for part in parts for name, statistic in part.items()]
    if not named:
        return {}
    values = torch.stack([statistic.value.double() for _, statistic in named]).tolist()
    return merge(
        {name: Metric(statistic.reduction, value, statistic.weight)}
        for (name, statistic), value in zip(named, values, strict=True)
    )
