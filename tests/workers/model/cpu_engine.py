"""Engines on this process's CPU, for tests, and their weights."""

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from workers.config.roles import ModelConfig, OptimizerConfig, ParallelConfig
from workers.model.engine import TrainingEngine

ADAMW = OptimizerConfig()
PARALLEL = {each.name for each in fields(ParallelConfig)}


def build_engine(
    path: str,
    *,
    optimizer: OptimizerConfig | None = ADAMW,
    head: str = "lm",
    offload: bool = False,
    **settings: Any,
) -> TrainingEngine:
    """Build an engine in float64. offload: the optimiser's state. settings: of ModelConfig and
    ParallelConfig.
    """
    parallel = ParallelConfig(
        **{name: settings.pop(name) for name in PARALLEL & settings.keys()}
    )
    model = ModelConfig(path=path, **{"dtype": "float64"} | settings)
    roles = {
        "optimizer": optimizer,
        "optimizer_offload": offload,
        "total_steps": 10,
        "head": head,
    }
    return TrainingEngine(model, device="cpu", parallel=parallel, **roles)


def weights(engine: TrainingEngine) -> dict[str, Tensor]:
    return {name: weight.clone() for name, weight in engine.named_weights()}


def assert_same(
    found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 0.0
) -> None:
    """The same names, types and values, within a relative and absolute tolerance."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
