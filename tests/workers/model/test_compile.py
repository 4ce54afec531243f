"""Compiled layers compute the same, share their graphs, and are not compiled again for rows of other lengths.

With backends that only trace, which show what is captured; `tests/gpu` runs inductor.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from controller.actors.launch import worker_arguments
from controller.config import load
from tests.controller.config_workspace import write_workspace
from tests.workers.model.cpu_engine import backward
from tests.workers.model.tiny import random_sequences, relative_error, save_tiny_model
from workers.batch.metrics import results
from workers.config.roles import LoraConfig, ModelConfig, OptimizerConfig, ParallelConfig
from workers.errors import ConfigError
from workers.model import compiled_layers as compiling
from workers.model.engine import TrainingEngine
from workers.model.rules.model_rules import compiles
from workers.model.sharding.parallel import full_tensor

GRAPHS_OF_A_LAYER = 4
"""Before attention the norm, and q, k, v with the rotary embedding; after it the output layer,
and the rest.
"""
KINDS_OF_PASS = 8
"""With gradient or without, of inputs that require one or not (the first layer's), of one token (an empty
micro-batch) or more.
"""


def trained(
    path: str,
    steps: int = 3,
    after_step: Callable[[], object] = lambda: None,
    device: str = "cpu",
    **model: Any,
) -> list[Tensor]:
    """Log-probs, loss and gradients of micro-batches of all lengths, one of them empty, over some steps.

    With share_prefixes=always, sequences begin alike.
    """
    branching = model.get("share_prefixes") == "always"
    torch._dynamo.reset()
    engine = TrainingEngine(
        ModelConfig(path=path, **model),
        optimizer=OptimizerConfig(learning_rate=1e-2),
        total_steps=10,
        device=device,
    )
    found = []
    for seed in range(steps):
        sequences = random_sequences(count=5 + seed, seed=seed, branching=branching)
        cuts = [(0, 2), (2, 2), (2, len(sequences))]
        found.append(engine.log_probs(sequences, cuts)[0])
        if engine.has_adapters:
            with engine.without_adapters():
                found.append(engine.log_probs(sequences, cuts)[0])
        metrics = backward(engine, sequences, cuts)
        found.append(torch.tensor(results(metrics)["loss"]))
        found += [
            full_tensor(p.grad).clone()
            for p in engine.module.parameters()
            if p.grad is not None
        ]
        engine.optimizer_step()
        after_step()
    return found


def largest_error(actual: list[Tensor], expected: list[Tensor]) -> float:
    return max(relative_error(*pair) for pair in zip(actual, expected, strict=True))


def compiled(
    monkeypatch: pytest.MonkeyPatch, backend: str, path: str, **model: Any
) -> tuple[list[Tensor], list[int]]:
    counter, graphs = CompileCounterWithBackend(backend), []
    monkeypatch.setattr(compiling, "BACKEND", counter)
    return trained(
        path,
        compile="always",
        after_step=lambda: graphs.append(counter.frame_count),
        **model,
    ), graphs


@pytest.mark.slow
def test_all_layers_and_all_lengths_share_their_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    path = save_tiny_model(tmp_path, num_hidden_layers=4)
    settings = {"dtype": "float64", "gradient_checkpointing": "full"}
    expected = trained(path, **settings)
    actual, graphs = compiled(monkeypatch, "eager", path, **settings)
    assert largest_error(actual, expected) < 1e-9
    assert GRAPHS_OF_A_LAYER <= graphs[0] <= GRAPHS_OF_A_LAYER * KINDS_OF_PASS
    assert graphs == [graphs[0]] * 3


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "settings", "kinds_of_layer"),
    [
        ("qwen2", {"gradient_checkpointing": "selective", "activation_offload": True}, 1),
        ("qwen2", {"lora": LoraConfig(rank=2)}, 2),  # with adapters and without
        ("gemma3", {}, 2),  # windowed and not
        ("qwen2", {"share_prefixes": "always", "min_shared_tokens": 1}, 1),
        ("qwen2", {"layout": "padded"}, 2),  # one row and several
        ("qwen3_moe", {"dtype": "float32"}, 2),  # and the experts
    ],
)
def test_traced_by_autograd_too_it_computes_the_same(
    tmp_path, monkeypatch, family, settings, kinds_of_layer
):
    path = save_tiny_model(tmp_path, family)
    settings = {"dtype": "float64"} | settings
    expected = trained(path, **settings)
    actual, graphs = compiled(monkeypatch, "aot_eager", path, **settings)
    assert largest_error(actual, expected) < (
        1e-9 if settings["dtype"] == "float64" else 1e-4
    )
    assert graphs[-1] <= kinds_of_layer * GRAPHS_OF_A_LAYER * KINDS_OF_PASS


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], False),
        (["resources.device=cuda"], True),
        (["resources.device=cuda", "policy.parallel.pipeline_parallel=2"], True),
        (["resources.device=cuda", "policy.parallel.tensor_parallel=2"], False),
        # As the version before wrote it.
        (["resources.device=cuda", "model.compile=false"], False),
    ],
)
def test_a_configuration_compiles_on_gpus(tmp_path, overrides, expected):
    config = load(write_workspace(tmp_path), ["model.share_prefixes=never", *overrides])
    settings = worker_arguments(config, "policy")
    assert (
        compiles(settings["model"], settings["parallel"], cuda=settings["device"] == "cuda")
        is expected
    )


def test_models_that_read_images_are_not_compiled():
    """A layer of Qwen2.5-VL was still being traced after 400 s."""
    assert not compiles(ModelConfig(path=""), ParallelConfig(), cuda=True, images=True)
    with pytest.raises(ConfigError, match=r"model\.compile=always"):
        compiles(
            ModelConfig(path="", compile="always"), ParallelConfig(), cuda=True, images=True
        )
