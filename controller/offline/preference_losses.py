"""Compute losses of pairs from log-probs of whole responses, and their gradients.

    S = sum over the response's tokens of log pi(y_t), or with `averages` their mean
    h = (S_c - S_c^ref) - (S_r - S_r^ref)                   c chosen, r rejected, without ^ref for simpo

    dpo     -(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h)          Rafailov et al. 2023, eq. 7, e: Mitchell 2023
    simpo   the same of beta h - margin                                    Meng et al. 2024, eq. 6
    ipo     (h - 1 / (2 beta))^2                                           Azar et al. 2023, eq. 17

The loss of P pairs is their mean. Its gradient by a sequence's log-prob needs the whole pair, but is one number, known
after a forward pass (`workers.model.losses.supervised`).

P pairs, 2P sequences: chosen, rejected, chosen, ...
"""

from dataclasses import dataclass

import numpy as np

from controller.config.offline import PreferenceLossConfig


@dataclass(frozen=True)
class PairLoss:
    """loss: mean over pairs. coefficients: dL/dS of each sequence's summed log-prob, float64 [2P]."""

    loss: float
    coefficients: np.ndarray
    metrics: dict[str, float]


def pair_loss(
    settings: PreferenceLossConfig, log_probs: np.ndarray, reference: np.ndarray | None, tokens: np.ndarray
) -> PairLoss:
    """log_probs, reference: summed log-probs of each response, float64 [2P]. tokens: of each response, [2P]."""
    weight = 1.0 / tokens if settings.averages else np.ones(len(tokens))
    rewards = settings.beta * weight * (log_probs if reference is None else log_probs - reference)
    chosen, rejected = rewards[0::2], rewards[1::2]
    losses, slopes = _ipo(settings, chosen - rejected) if settings.name == "ipo" else _dpo(settings, chosen - rejected)
    pairs = len(losses)
    return PairLoss(
        loss=float(losses.mean()),
        coefficients=settings.beta * weight * np.stack([slopes, -slopes], axis=1).ravel() / pairs,
        metrics={
            "accuracy": float((chosen > rejected).mean()),
            "margin": float((chosen - rejected).mean()),
            "chosen_reward": float(chosen.mean()),
            "rejected_reward": float(rejected.mean()),
        },
    )


def _dpo(settings: PreferenceLossConfig, difference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    logit, wrong = difference - settings.margin, settings.label_smoothing
    losses = (1 - wrong) * np.logaddexp(0, -logit) + wrong * np.logaddexp(0, logit)
    return losses, wrong - np.exp(-np.logaddexp(0, logit))  # e - sigmoid(-logit)


def _ipo(settings: PreferenceLossConfig, difference: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    missing = (difference - 0.5) / settings.beta
    return missing**2, 2 * missing / settings.beta
