"""Engines on this process's CPU, for tests."""

from dataclasses import fields
from typing import Any

from workers.config import ModelConfig, OptimizerConfig, ParallelConfig
from workers.model.engine import TrainingEngine

ADAMW = OptimizerConfig()
PARALLEL = {each.name for each in fields(ParallelConfig)}


def build_engine(
    path: str, *, optimizer: OptimizerConfig | None = ADAMW, head: str = "lm", **settings: Any
) -> TrainingEngine:
    """Build an engine in float64. settings: of ModelConfig and ParallelConfig."""
    parallel = ParallelConfig(**{name: settings.pop(name) for name in PARALLEL & settings.keys()})
    model = ModelConfig(path=path, **{"dtype": "float64"} | settings)
    return TrainingEngine(model, optimizer=optimizer, total_steps=10, device="cpu", parallel=parallel, head=head)
