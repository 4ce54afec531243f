"""Shared beginnings with the CUDA kernels: a call a level, merged by log-sum-exp, against a mask in float64.

It needs torch, transformers, pytest and hypothesis, and of this project `workers` and `balancing`.
"""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.workers.model.test_shared_prefixes import by_mask, computed, stairs
from tests.workers.model.tiny import random_sequences, relative_error, save_tiny_model
from workers.config import LossConfig, ModelConfig, OptimizerConfig
from workers.metrics import results
from workers.model import shared_attention
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, make_policy_loss
from workers.model.packing import Sequences
from workers.model.parallel import full_tensor
from workers.model.shared_attention import SharedAttention
from workers.model.shared_prefixes import SharedRow, pack_shared

DIM, BFLOAT16_ERROR = 64, 2e-2


def groups(*shapes: tuple[int, list[int]]) -> Sequences:
    """Of each (prompt, responses), a sequence for every response; all in tokens."""
    rows = []
    for group, (prompt, responses) in enumerate(shapes):
        for index, response in enumerate(responses):
            ids = torch.cat([torch.full((prompt,), 1000 + group), torch.full((response,), index)])
            rows.append({"input_ids": ids, "loss_mask": torch.arange(len(ids)) >= prompt})
    return Sequences.from_list(rows)


ROWS = {
    "two groups": groups((300, [5, 80, 200, 1]), (40, [130, 64, 64])),
    "random trees": random_sequences(30, seed=2, branching=True),
    "four levels": stairs(4),
    "one prompt of 2,048 tokens": groups((2048, [256] * 8)),
}


def random_inputs(row: SharedRow, heads: tuple[int, int]) -> list[Tensor]:
    """query, key, value and the gradient of the output, float64, rounded to bfloat16."""
    width, generator = row.input_ids.shape[1], torch.Generator().manual_seed(0)
    query, key = (1, heads[0], width, DIM), (1, heads[1], width, DIM)
    shapes = [query, key, key, (1, width, heads[0], DIM)]
    return [torch.randn(shape, generator=generator).bfloat16().double() for shape in shapes]


@pytest.mark.parametrize("heads", [(8, 2), (4, 4)])
@pytest.mark.parametrize("name", ROWS)
def test_attention_over_levels_equals_that_of_a_mask(name, heads, device, monkeypatch):
    monkeypatch.setattr(shared_attention, "PRODUCTS_OF_A_CALL", 0)  # on a CPU as on CUDA
    row = pack_shared(ROWS[name], 8)
    inputs = random_inputs(row, heads)
    found = computed(SharedAttention(row, device), [tensor.to(device, torch.bfloat16) for tensor in inputs])
    for one, other in zip(found, by_mask(row, inputs), strict=True):
        assert one.dtype == torch.bfloat16
        assert relative_error(one.cpu().double(), other) < BFLOAT16_ERROR


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", head_dim=16)


def learned(path: Path, device: torch.device, **model: object) -> tuple[float, dict[str, Tensor]]:
    """Loss and gradients of a mini-batch in two micro-batches."""
    config = ModelConfig(path=path, min_shared_tokens=1, **model)
    engine = TrainingEngine(config, optimizer=OptimizerConfig(), total_steps=1, device=device.type)
    sequences = random_sequences(dtype=torch.float32, branching=True)
    loss = make_policy_loss(LossConfig(entropy_coefficient=0.02, kl_coefficient=0.1))
    metrics = engine.forward_backward(sequences, [(0, 7), (7, 11)], loss, Denominators.of(sequences))
    gradients = {name: full_tensor(p.grad).cpu() for name, p in engine.module.named_parameters()}
    return results(metrics)["loss"], gradients


@pytest.mark.parametrize("checkpointing", [False, True])
def test_loss_and_gradients_are_as_near_to_float32_with_sharing_as_without(path, device, checkpointing):
    given = {"dtype": "bfloat16", "gradient_checkpointing": checkpointing}
    _, exact = learned(path, device, dtype="float32", share_prefixes="never")
    loss, gradients = learned(path, device, share_prefixes="never", **given)
    shared_loss, shared = learned(path, device, share_prefixes="always", **given)
    assert shared_loss == pytest.approx(loss, rel=0.05)
    noise = {name: (gradient - exact[name]).norm() for name, gradient in gradients.items()}
    for name, gradient in shared.items():
        assert (gradient - exact[name]).norm() < 2 * noise[name] + 1e-2 * exact[name].norm(), name
