"""Compiling, activation offload and the memory of an update, through the engine.

It needs torch, transformers and pytest; the comparison with the simulated GPU also `controller` and
OmegaConf.
"""

import gc
from pathlib import Path

import pytest
import torch

from tests.gpu.conftest import NEEDS_CUDA
from tests.workers.model.test_compile import largest_error, trained
from tests.workers.model.tiny import relative_error, save_tiny_model
from workers.batch.dataproto import DataProto
from workers.config.roles import ModelConfig, OptimizerConfig
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, sft
from workers.model.losses.logprobs import linear_log_probs

GIB = 2**30


@pytest.fixture
def path(tmp_path: Path) -> str:
    return save_tiny_model(tmp_path, head_dim=16)


@pytest.mark.parametrize("cuda", [pytest.param("cuda", marks=NEEDS_CUDA)])
@pytest.mark.parametrize("settings", [{}, {"gradient_checkpointing": "full"}])
def test_compiled_by_inductor_layers_compute_the_same(path, settings, cuda):
    """On a CPU tests/workers/model/test_compile.py runs the same with backends that only trace.

    One step: three steps of AdamW at the test's learning rate make 3.5e-4 of rounding errors of 1e-7.
    """
    settings = settings | {"device": cuda, "dtype": "float32", "steps": 1}
    assert (
        largest_error(trained(path, **settings), trained(path, compile="never", **settings))
        < 1e-4
    )


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_log_probs_in_chunks_equal_float64(dtype, tolerance, device):
    """The passes over the logits are compiled on a card."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(size, 64, generator=generator).to(device, dtype) for size in (300, 5000)
    )
    targets = torch.randint(0, 5000, (300,), generator=generator).to(device)
    found = []
    for given in ((hidden, weight), (hidden.double(), weight.double())):
        leaves = [tensor.detach().requires_grad_() for tensor in given]
        log_probs, entropy = linear_log_probs(
            *leaves, None, targets, temperature=8.0, chunk_tokens=128
        )
        (log_probs.sum() + entropy.sum()).backward()
        found.append([log_probs, entropy, *(leaf.grad for leaf in leaves)])
    for one, other in zip(*found, strict=True):
        assert relative_error(one.double(), other) < tolerance


def test_offloaded_activations_change_nothing(path, device):
    settings = {
        "device": device.type,
        "dtype": "float32",
        "gradient_checkpointing": "full",
        "steps": 1,
    }
    assert (
        largest_error(
            trained(path, activation_offload=True, **settings), trained(path, **settings)
        )
        < 1e-6
    )


SMALL = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "vocab_size": 512,
}
LARGE = {
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 8,
    "vocab_size": 32_000,
}
"""170 million parameters: large enough that what is not counted (workspaces, fragments) is small
beside it.
"""


def update_peak(
    path: str, device: torch.device, micro_batches: int, length: int, **model: object
) -> float:
    """GiB allocated at the fullest moment of a whole update with so many micro-batches; 0 on a CPU."""
    gc.collect()  # an engine before this one refers to itself and would be counted
    config = ModelConfig(path=path, gradient_checkpointing="full", **model)
    engine = TrainingEngine(
        config, optimizer=OptimizerConfig(), total_steps=1, device=device
    )
    one = {"input_ids": torch.arange(length) % 500, "loss_mask": torch.arange(length) > 0}
    sequences = DataProto.from_list([one] * micro_batches)
    for _ in range(2):  # AdamW's moments come with the first step
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        rows = [(index, index + 1) for index in range(micro_batches)]
        engine.forward_backward(sequences, rows, sft, Denominators.of(sequences))
        engine.optimizer_step()
    return torch.cuda.max_memory_allocated() / GIB if device.type == "cuda" else 0.0


def simulated(path: str, length: int, **model: object) -> float:
    """GiB that `--dry-run --cluster` measures of the same update."""
    from controller.config import Config
    from controller.preflight.memory import measure

    config = Config()
    config.resources.device = "cuda"
    config.model = ModelConfig(path=path, gradient_checkpointing="full", **model)
    config.data.max_prompt_tokens = 1
    config.rollout.sampling.max_new_tokens, config.policy.max_tokens_per_micro_batch = (
        length - 1,
        length,
    )
    return sum(measure(config).passes["policy.update"].values())


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "settings", [{}, {"activation_offload": True}], ids=["on the device", "offloaded"]
)
def test_an_update_takes_what_was_measured_however_many_micro_batches_it_has(
    tmp_path, device, settings
):
    """On a CPU the update only runs: CUDA counts what is allocated."""
    pytest.importorskip("omegaconf")
    size, length = (LARGE, 8192) if device.type == "cuda" else (SMALL, 64)
    path = save_tiny_model(
        tmp_path,
        **size,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=length,
    )
    two, four = (update_peak(path, device, count, length, **settings) for count in (2, 4))
    if device.type == "cuda":
        expected = simulated(path, length, **settings)
        # A tenth is left free for what is not counted.
        assert 0.8 * expected < two <= expected / 0.9
        # Gradients that wait for the last micro-batch would add up.
        assert four == pytest.approx(two, rel=0.05)
