"""Losses of pairs against the formulas of the papers, and their gradients against autograd, in float64."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from controller.config.offline import PreferenceLossConfig
from controller.offline.preference_losses import pair_loss

TOKENS = np.array([3, 5, 2, 2, 7, 1])
LOG_PROBS, REFERENCE = np.random.default_rng(0).normal(-8, 3, (2, 6))


def by_the_papers(settings: PreferenceLossConfig, log_probs: Tensor) -> Tensor:
    """Mean over the three pairs, of log-probs [6]."""
    beta, e = settings.beta, settings.label_smoothing
    ratio = (
        log_probs if settings.name == "simpo" else log_probs - torch.from_numpy(REFERENCE)
    )
    if settings.name == "simpo" or settings.log_probs == "mean":
        ratio = ratio / torch.from_numpy(TOKENS)
    h = ratio[[0, 2, 4]] - ratio[[1, 3, 5]]
    if settings.name == "ipo":
        return ((h - 1 / (2 * beta)) ** 2).mean()
    logit = beta * h - settings.margin
    return (-(1 - e) * logsigmoid(logit) - e * logsigmoid(-logit)).mean()


@pytest.mark.parametrize(
    "settings",
    [
        PreferenceLossConfig(),
        PreferenceLossConfig(beta=0.7, label_smoothing=0.2),
        PreferenceLossConfig(log_probs="mean", beta=2.0),
        PreferenceLossConfig(name="ipo", beta=0.3),
        PreferenceLossConfig(name="ipo", beta=0.3, log_probs="mean"),
        PreferenceLossConfig(name="simpo", beta=2.0, margin=0.5),
    ],
    ids=lambda settings: f"{settings.name} {settings.log_probs} {settings.label_smoothing}",
)
def test_loss_and_gradient_are_those_of_the_papers(settings: PreferenceLossConfig) -> None:
    log_probs = torch.tensor(LOG_PROBS, requires_grad=True)
    expected = by_the_papers(settings, log_probs)
    expected.backward()
    reference = None if settings.name == "simpo" else REFERENCE
    found = pair_loss(settings, LOG_PROBS, reference, TOKENS)
    assert found.loss == pytest.approx(expected.item(), rel=1e-12)
    np.testing.assert_allclose(
        found.coefficients, log_probs.grad.numpy(), rtol=1e-12, atol=1e-15
    )


def test_rewards_are_beta_times_the_log_ratio() -> None:
    chosen_first = np.array([-1.0, -4.0]), np.array([-2.0, -3.0])
    metrics = pair_loss(
        PreferenceLossConfig(beta=0.5), *chosen_first, np.array([1, 1])
    ).metrics
    assert metrics == pytest.approx(
        {"accuracy": 1, "margin": 1, "chosen_reward": 0.5, "rejected_reward": -0.5}
    )


def test_a_hopeless_pair_overflows_nothing() -> None:
    found = pair_loss(
        PreferenceLossConfig(beta=1.0), np.array([-9e4, 0.0]), np.zeros(2), np.array([1, 1])
    )
    assert found.loss == pytest.approx(9e4)
    assert found.coefficients.tolist() == [-1.0, 1.0]
    assert math.isfinite(found.metrics["margin"])
