"""The KL as a loss term: its mean gradient over a whole vocabulary, and an engine's gradients from a
configuration.
"""

import math

import pytest
import torch
from torch import Tensor

from controller.config import load
from tests.workers.model.cpu_engine import build_engine, gradients_of
from tests.workers.model.losses.loss_cases import loss_and_gradient
from tests.workers.model.tiny import random_sequences, relative_error
from workers.batch.dataproto import DataProto
from workers.config.roles import LossConfig
from workers.errors import ConfigError
from workers.model.losses import Denominators, kl_of_loss, make_policy_loss

LOGITS = torch.tensor([0.4, -1.0, 0.8, 0.0], dtype=torch.float64)
REFERENCE = torch.tensor([0.2, 0.5, 0.1, 0.2], dtype=torch.float64)
OLD = torch.tensor([0.1, 0.3, 0.2, 0.4], dtype=torch.float64)


def gradient(of: Tensor, logits: Tensor) -> Tensor:
    (found,) = torch.autograd.grad(of, logits)
    return found


def expected_gradient(estimator: str, correction: str, old: Tensor | None = None) -> Tensor:
    """Mean gradient of the loss term by the policy's logits, over samples of `old` (None: of the policy)."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(-1)
    old = log_probs.detach().exp() if old is None else old
    ratio = (log_probs - old.log()).exp()
    terms = kl_of_loss(REFERENCE.log() - log_probs, ratio, estimator, correction)
    return gradient((old * terms).sum(), logits)


def exact_gradient(reverse: bool = False) -> Tensor:
    """Of KL(pi || reference), or with `reverse` of KL(reference || pi)."""
    logits = LOGITS.clone().requires_grad_()
    log_probs = logits.log_softmax(-1)
    forward = (log_probs.exp() * (log_probs - REFERENCE.log())).sum()
    return gradient(
        (REFERENCE * (REFERENCE.log() - log_probs)).sum() if reverse else forward, logits
    )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@pytest.mark.parametrize("correction", ["straight_through", "importance"])
def test_a_corrected_gradient_is_that_of_the_kl(estimator, correction):
    torch.testing.assert_close(expected_gradient(estimator, correction), exact_gradient())


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_the_ratio_makes_samples_of_an_older_policy_stand_for_those_of_the_policy(
    estimator,
):
    torch.testing.assert_close(
        expected_gradient(estimator, "importance", OLD), exact_gradient()
    )
    assert (
        relative_error(
            expected_gradient(estimator, "straight_through", OLD), exact_gradient()
        )
        > 0.1
    )


def test_without_correction_the_gradients_are_others():
    torch.testing.assert_close(expected_gradient("k1", "none"), torch.zeros_like(LOGITS))
    torch.testing.assert_close(
        expected_gradient("k3", "none"), exact_gradient(reverse=True)
    )
    torch.testing.assert_close(expected_gradient("k2", "none"), exact_gradient())


def test_straight_through_keeps_the_value_of_the_estimate():
    log_ratio = torch.tensor([-2.0, 0.5], dtype=torch.float64)
    kept = kl_of_loss(log_ratio, torch.ones(2), "k3", "straight_through")
    torch.testing.assert_close(kept, log_ratio.expm1() - log_ratio)
    with pytest.raises(ConfigError, match="kl_correction=often"):
        kl_of_loss(log_ratio, torch.ones(2), "k3", "often")


def test_importance_by_hand():
    config = LossConfig(kl_coefficient=1.0, kl_estimator="k1", kl_correction="importance")
    loss, gradient, metrics = loss_and_gradient(
        config,
        [-1.0],
        advantages=[0.0],
        old_log_probs=[-1.5],
        reference_log_probs=[-3.0],
    )
    ratio = math.exp(0.5)
    assert loss == metrics["reference_kl"] == pytest.approx(ratio * 2)
    assert gradient == pytest.approx([ratio * 2 + ratio])


def kl_gradients(path: str, sequences: DataProto, *overrides: str) -> Tensor:
    """All gradients of an engine, of the KL alone, as a run with these settings has them."""
    settings = [f"model.path={path}", "algorithm.loss.kl_coefficient=1", *overrides]
    loss = make_policy_loss(load(None, settings).algorithm.loss)
    engine = build_engine(path)
    engine.forward_backward(
        sequences, [(0, len(sequences))], loss, Denominators.of(sequences)
    )
    return gradients_of(engine)


def test_the_settings_reach_the_gradients(model):
    """Of samples of the policy itself, k3 corrected either way has the gradient of k2, token by token."""
    sequences = random_sequences()
    del sequences.tokens["old_log_probs"]  # as where a step has one update
    sequences.columns["advantages"].zero_()
    right = kl_gradients(model, sequences, "algorithm.loss.kl_estimator=k2")
    assert relative_error(kl_gradients(model, sequences), right) > 0.1
    for correction in ("straight_through", "importance"):
        found = kl_gradients(model, sequences, f"algorithm.loss.kl_correction={correction}")
        assert relative_error(found, right) < 1e-9
