"""Losses that are sums over tokens, for `forward_backward` calls whose number is not known in advance.

No denominator, so that gradients add up over calls, however a batch is split. Names and forms are Tinker's
(tinker-docs.thinkingmachines.ai/losses). r_t = exp(log pi(y_t) - log q(y_t)), q: the sampler,
`rollout_log_probs`. A_t: `advantages`. A token column `mask`, if there is one, multiplies each token's loss.
"""

from collections.abc import Callable

from torch import Tensor

from workers.config.loss import SUM_LOSS_NAMES, SumLossConfig
from workers.errors import ConfigError
from workers.model.losses.aggregation import Denominators
from workers.model.losses.kl import bounded_exp
from workers.model.losses.predictions import Predictions, Statistics, mean, total
from workers.model.losses.ratio_losses import sequence_ratio
from workers.model.losses.registry import LossFunction


def _cross_entropy(predictions: Predictions, config: SumLossConfig) -> Tensor:
    return -predictions["weights"] * predictions.log_probs


def _importance_sampling(predictions: Predictions, config: SumLossConfig) -> Tensor:
    return -_ratio(predictions) * predictions["advantages"]


def _ppo(predictions: Predictions, config: SumLossConfig) -> Tensor:
    return _surrogate(_ratio(predictions), predictions["advantages"], config)


def _cispo(predictions: Predictions, config: SumLossConfig) -> Tensor:
    weight = _ratio(predictions).detach().clamp(config.ratio_low, config.ratio_high)
    return -weight * predictions["advantages"] * predictions.log_probs


def _dro(predictions: Predictions, config: SumLossConfig) -> Tensor:
    log_ratio = predictions.log_probs - predictions["rollout_log_probs"]
    return (
        -predictions.log_probs * predictions["advantages"]
        + 0.5 * config.beta * log_ratio.square()
    )


def _gspo(predictions: Predictions, config: SumLossConfig) -> Tensor:
    ratio = sequence_ratio(
        predictions, predictions.log_probs - predictions["rollout_log_probs"]
    )
    return _surrogate(ratio, predictions["advantages"], config)


FORMS: dict[str, Callable[[Predictions, SumLossConfig], Tensor]] = {
    "cross_entropy": _cross_entropy,
    "importance_sampling": _importance_sampling,
    "ppo": _ppo,
    "cispo": _cispo,
    "dro": _dro,
    "gspo": _gspo,
}


def make_sum_loss(config: SumLossConfig) -> LossFunction:
    """Return sum_t L_t over tokens with `loss_mask`. Raises ConfigError for an unknown name.

    cross_entropy          L_t = -w_t log pi(y_t)                         w: `weights`, of any sign
    importance_sampling    L_t = -r_t A_t
    ppo                    L_t = -min(r_t A_t, clip(r_t) A_t)             clip: to [ratio_low, ratio_high]
    cispo                  L_t = -sg(clip(r_t)) A_t log pi(y_t)           sg: no gradient
    dro                    L_t = -A_t log pi(y_t) + beta / 2 (log r_t)^2  Richemond et al. 2024
    gspo                   as ppo, with the geometric mean of the sequence's ratios (`ratio_losses.gspo`)
    """
    if config.name not in FORMS:
        raise ConfigError(
            f"loss={config.name}: unknown. Choose one of {', '.join(SUM_LOSS_NAMES)}."
        )

    def summed(
        predictions: Predictions, denominators: Denominators
    ) -> tuple[Tensor, Statistics]:
        del denominators
        losses = FORMS[config.name](predictions, config)
        loss = (losses * predictions.columns.get("mask", 1)).sum()
        return loss, {"loss": total(loss), "entropy": mean(predictions.entropy)}

    return summed


def _ratio(predictions: Predictions) -> Tensor:
    return bounded_exp(predictions.log_probs - predictions["rollout_log_probs"])


def _surrogate(ratio: Tensor, advantages: Tensor, config: SumLossConfig) -> Tensor:
    return -(ratio * advantages).minimum(
        ratio.clamp(config.ratio_low, config.ratio_high) * advantages
    )
