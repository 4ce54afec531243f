"""Engines on this process's CPU, for tests, and their weights."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from workers.batch.dataproto import DataProto
from workers.batch.metrics import Metrics
from workers.config.roles import ModelConfig, OptimizerConfig, ParallelConfig
from workers.model.engine import TrainingEngine
from workers.model.losses import Denominators, sft
from workers.model.sharding.parallel import full_tensor

ADAMW = OptimizerConfig()
PARALLEL = {field.name for field in fields(ParallelConfig)}
ENGINE = {
    "check_numerics",
    "parallel",
    "reshard_after_forward",
    "temperature",
    "total_steps",
}


def build_engine(
    path: str,
    *,
    optimizer: OptimizerConfig | None = ADAMW,
    head: str = "lm",
    offload: bool = False,
    **settings: Any,
) -> TrainingEngine:
    """Build an engine in float64. offload: the optimiser's state. settings: of ModelConfig, ParallelConfig and
    TrainingEngine.
    """
    parallel = ParallelConfig(
        **{name: settings.pop(name) for name in PARALLEL & settings.keys()}
    )
    options = {"parallel": parallel, "total_steps": 10}
    options |= {name: settings.pop(name) for name in ENGINE & settings.keys()}
    return TrainingEngine(
        ModelConfig(path=path, **{"dtype": "float64"} | settings),
        device="cpu",
        head=head,
        optimizer=optimizer,
        optimizer_offload=offload,
        **options,
    )


def backward(
    engine: TrainingEngine,
    sequences: DataProto,
    micro_batches: list[tuple[int, int]] | None = None,
) -> Metrics:
    """Accumulate gradients of the supervised loss. micro_batches: by default one of all sequences."""
    cuts = [(0, len(sequences))] if micro_batches is None else micro_batches
    return engine.forward_backward(sequences, cuts, sft, Denominators.of(sequences))


def weights(engine: TrainingEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.named_weights()}


def gradients_of(engine: TrainingEngine) -> Tensor:
    """The whole gradients of all parameters, one behind the other."""
    return torch.cat(
        [full_tensor(weight.grad).flatten() for weight in engine.module.parameters()]
    )


def assert_same(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 0.0
) -> None:
    """The same names, types and values, within a relative and absolute tolerance."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
