"""Padded rows through the whole engine: what is learned is what packed rows learn."""

import pytest
import torch

from tests.workers.model.tiny import random_sequences, relative_error, save_tiny_model
from workers.config import LossConfig, ModelConfig, OptimizerConfig
from workers.metrics import results
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, make_policy_loss
from workers.model.parallel import full_tensor

MICRO_BATCHES = [(0, 4), (4, 4), (4, 11)]


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe"])
def path(tmp_path_factory, request):
    return save_tiny_model(tmp_path_factory.mktemp("model"), request.param)


def learned(path: str, **model: object) -> tuple[torch.Tensor, dict[str, float], dict[str, torch.Tensor]]:
    """Log-probs, metrics and gradients of one mini-batch."""
    engine = TrainingEngine(
        ModelConfig(path=path, dtype="float64", **model), optimizer=OptimizerConfig(), total_steps=1, device="cpu"
    )
    if engine.module.model._can_set_experts_implementation():
        engine.module.model.set_experts_implementation("eager")  # the grouped product takes no float64
    sequences = random_sequences()
    log_probs, _ = engine.log_probs(sequences, MICRO_BATCHES)
    loss = make_policy_loss(LossConfig(entropy_coefficient=0.02, kl_coefficient=0.1))
    metrics = engine.forward_backward(sequences, MICRO_BATCHES, loss, Denominators.of(sequences))
    gradients = {name: full_tensor(parameter.grad) for name, parameter in engine.module.named_parameters()}
    return log_probs, results(metrics), gradients


def test_m1_loss_metrics_and_gradients_are_those_of_packed_rows(path):
    log_probs, metrics, gradients = learned(path, layout="padded", length_multiple=8)
    expected_log_probs, expected_metrics, expected_gradients = learned(path)
    torch.testing.assert_close(log_probs, expected_log_probs)
    assert metrics == pytest.approx(expected_metrics, rel=1e-9)
    for name, gradient in expected_gradients.items():
        assert relative_error(gradients[name], gradient) < 1e-9, name
