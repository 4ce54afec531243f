"""Plan invariance with the CUDA kernels: packed rows give what one unpadded sequence at a time gives.

It needs torch, transformers and pytest, and of this project `workers.model` alone.
"""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.gpu.conftest import NEEDS_CUDA
from tests.workers.model.tiny import (
    random_sequences,
    relative_error,
    save_tiny_model,
    tiny_config,
    unpacked_log_probs,
)
from workers.batch.dataproto import DataProto
from workers.batch.metrics import results
from workers.config.roles import LossConfig, ModelConfig, OptimizerConfig
from workers.model.attention.attention import choose_backend, packed_attention
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, make_policy_loss
from workers.model.model import packed_causal_lm
from workers.model.rows.packing import pack
from workers.model.sharding.parallel import full_tensor

pytestmark = list(NEEDS_CUDA)
CUDA = torch.device("cuda")
FAMILIES = ["qwen2", "qwen3", "llama", "mistral windowed", "gemma", "gemma3", "qwen3_moe"]


def random_model(family: str, dtype: torch.dtype) -> PreTrainedModel:
    """The same weights for every dtype, rounded to it. Heads of 16: the kernels want multiples of 8."""
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(
        tiny_config(family, head_dim=16), dtype=torch.float32
    ).to(CUDA, dtype)


def gradients_of(model: PreTrainedModel, log_probs: Tensor) -> dict[str, Tensor]:
    weights = torch.randn(len(log_probs), generator=torch.Generator().manual_seed(1)).to(
        log_probs
    )
    (weights * log_probs).sum().backward()
    return {
        name: parameter.grad.float()
        for name, parameter in model.named_parameters()
        if parameter.grad is not None
    }


def unpacked(
    model: PreTrainedModel, sequences: DataProto
) -> tuple[Tensor, dict[str, Tensor]]:
    model = copy.deepcopy(model)
    outputs = unpacked_log_probs(model, sequences.to(CUDA))
    log_probs = torch.cat([log_probs.float() for log_probs, _ in outputs])[
        sequences.tokens["loss_mask"].to(CUDA)
    ]
    return log_probs, gradients_of(model, log_probs)


def packed(
    model: PreTrainedModel, sequences: DataProto
) -> tuple[Tensor, dict[str, Tensor]]:
    module, row = packed_causal_lm(copy.deepcopy(model), ModelConfig()), pack(sequences)
    backend = choose_backend(
        "auto", CUDA, next(model.parameters()).dtype, module.required_features
    )
    attention = packed_attention(backend, row, CUDA)
    read = {
        name: getattr(row, name).to(CUDA)
        for name in ("input_ids", "position_ids", "predicting", "targets")
    }
    log_probs, _ = module(replace(row, attention=attention, **read), 1.0)
    return log_probs, gradients_of(module.model, log_probs)


@pytest.mark.parametrize("family", FAMILIES)
def test_packed_equals_unpacked_in_float32(family):
    model, sequences = (
        random_model(family, torch.float32),
        random_sequences(dtype=torch.float32),
    )
    log_probs, gradients = packed(model, sequences)
    expected, expected_gradients = unpacked(model, sequences)
    assert relative_error(log_probs, expected) < 1e-5
    for name, gradient in expected_gradients.items():
        assert relative_error(gradients[name], gradient) < 1e-4, name


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "qwen3_moe"])
def test_packed_in_bfloat16_is_as_near_to_float32_as_unpacked(family):
    """The noise of bfloat16 itself. Without the experts: a router on the edge sends a token elsewhere."""
    model, sequences = (
        random_model(family, torch.bfloat16),
        random_sequences(dtype=torch.float32),
    )
    exact, _ = unpacked(copy.deepcopy(model).float(), sequences)
    noise = (unpacked(model, sequences)[0] - exact).abs().mean()
    assert (packed(model, sequences)[0] - exact).abs().mean() < 1.5 * noise


@pytest.fixture(scope="module")
def path(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "qwen2", head_dim=16)


def learned(
    path: str,
    micro_batches: list[tuple[int, int]],
    device: torch.device = CUDA,
    branching: bool = False,
    **model: object,
) -> tuple[dict, dict[str, Tensor]]:
    """Metrics and gradients of one mini-batch through the engine. branching: sequences begin alike."""
    config = ModelConfig(path=path, **model)
    engine = TrainingEngine(
        config, optimizer=OptimizerConfig(), total_steps=1, device=device
    )
    sequences = random_sequences(dtype=torch.float32, branching=branching)
    loss = make_policy_loss(LossConfig(entropy_coefficient=0.02, kl_coefficient=0.1))
    metrics = engine.forward_backward(
        sequences, micro_batches, loss, Denominators.of(sequences)
    )
    return results(metrics), {
        name: full_tensor(p.grad) for name, p in engine.module.named_parameters()
    }


@pytest.mark.parametrize("layout", ["packed", "padded"])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_the_engine_learns_the_same_however_the_batch_is_cut(
    path, layout, dtype, tolerance
):
    whole, gradients = learned(path, [(0, 11)], dtype=dtype)
    cut, cut_gradients = learned(
        path, [(0, 4), (4, 4), (4, 11)], dtype=dtype, layout=layout
    )
    assert cut["loss"] == pytest.approx(whole["loss"], rel=tolerance)
    for name, gradient in gradients.items():
        assert relative_error(cut_gradients[name], gradient) < tolerance, name
