"""Compute losses of pairs from log-probs or scores of whole responses, and their gradients.

    S = sum over the response's tokens of log pi(y_t), or with `averages` their mean
    h = (S_c - S_c^ref) - (S_r - S_r^ref)                   c chosen, r rejected, without ^ref for simpo

    dpo     -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)          Rafailov et al. 2023, eq. 7
                                                                           e: Mitchell 2023
    simpo   the same of beta h - margin                                    Meng et al. 2024, eq. 6
    ipo     (h - 1 / (2 beta))^2                                           Azar et al. 2023, eq. 17

    bradley_terry   -log sigmoid(s_c - s_r - margin) + c (s_c + s_r)^2     s scores of a reward model

Bradley-Terry: Ouyang et al. 2022, eq. 1, margins of Touvron et al. 2023 (Llama 2), eq. 2, centring of
Eisenstein et al. 2023 (arXiv:2312.09244).

The loss of P pairs is their mean. Its gradient by a sequence's log-prob or score needs the whole pair, but is
one number, known after a forward pass (`workers.model.losses.supervised`).

P pairs, 2P sequences: chosen, rejected, chosen, ...
"""

from dataclasses import dataclass

import numpy as np

from controller.config.offline import PreferenceLossConfig, RewardLossConfig


@dataclass(frozen=True)
class PairLoss:
    """loss: mean over pairs. coefficients: dL/dS of each sequence's summed log-prob, or score,
    float64 [2P].
    """

    loss: float
    coefficients: np.ndarray
    metrics: dict[str, float]


def pair_loss(
    settings: PreferenceLossConfig,
    log_probs: np.ndarray,
    reference: np.ndarray | None,
    tokens: np.ndarray,
) -> PairLoss:
    """log_probs, reference: summed log-probs of each response, float64 [2P]. tokens: of each
    response, [2P].
    """
    weight = 1.0 / tokens if settings.averages else np.ones(len(tokens))
    rewards = (
        settings.beta * weight * (log_probs if reference is None else log_probs - reference)
    )
    chosen = rewards[0::2]
    rejected = rewards[1::2]
    losses, slopes = (
        _ipo(settings, chosen - rejected)
        if settings.name == "ipo"
        else _dpo(settings, chosen - rejected)
    )
    coefficients = settings.beta * weight * np.stack([slopes, -slopes], axis=1).ravel()
    return _loss_of(losses, coefficients, chosen, rejected)


def bradley_terry(
    settings: RewardLossConfig, scores: np.ndarray, margins: np.ndarray
) -> PairLoss:
    """scores: float64 [2P]. margins: float64 [P]."""
    chosen = scores[0::2]
    rejected = scores[1::2]
    weight = settings.center_rewards_coefficient
    logit = chosen - rejected - margins
    both = chosen + rejected
    slopes = -np.exp(-np.logaddexp(0, logit))
    pull = 2 * weight * both
    losses = np.logaddexp(0, -logit) + weight * both**2
    return _loss_of(
        losses, np.stack([slopes + pull, pull - slopes], axis=1).ravel(), chosen, rejected
    )


def _loss_of(
    losses: np.ndarray, slopes: np.ndarray, chosen: np.ndarray, rejected: np.ndarray
) -> PairLoss:
    return PairLoss(
        loss=float(losses.mean()),
        coefficients=slopes / len(losses),
        metrics={
            "accuracy": float((chosen > rejected).mean()),
            "margin": float((chosen - rejected).mean()),
            "chosen_reward": float(chosen.mean()),
            "rejected_reward": float(rejected.mean()),
        },
    )


def _dpo(
    settings: PreferenceLossConfig, difference: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    logit = difference - settings.margin
    wrong = settings.label_smoothing
    losses = (1 - wrong) * np.logaddexp(0, -logit) + wrong * np.logaddexp(0, logit)
    return losses, wrong - np.exp(-np.logaddexp(0, logit))  # e - sigmoid(-logit)


def _ipo(
    settings: PreferenceLossConfig, difference: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    missing = (difference - 0.5) / settings.beta
    return missing**2, 2 * missing / settings.beta
