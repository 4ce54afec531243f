"""Return what the workers of a training role are made with."""

from dataclasses import replace
from typing import Any

from controller.config import TrainingConfig
from controller.config.file import value_of
from controller.config.functions import absolute


def worker_arguments(
    config: TrainingConfig, role: str, total_steps: int = 1
) -> dict[str, Any]:
    """Return a training role's constructor arguments. total_steps: optimiser steps, if the role learns."""
    spec = config.spec(role)
    settings = value_of(config, spec.settings_section)
    models = {
        name: config.decide_prefixes(model)
        for name, model in config.models_of(role).items()
    }
    arguments = {
        "model": next(iter(models.values())),
        "models": {} if "" in models else models,
        "device": config.device,
        "temperature": config.temperature,
        "threads": config.policy.threads,
        "parallel": config.policy.parallel,
        "cpu_offload": settings.cpu_offload in (True, "all"),
    }
    if spec.learns:
        arguments |= {
            "optimizer": replace(
                settings.optimizer,
                function=absolute(settings.optimizer.function),
                schedule_function=absolute(settings.optimizer.schedule_function),
            ),
            "optimizer_offload": settings.cpu_offload == "optimizer",
            "total_steps": total_steps,
            "reshard_after_forward": config.policy.reshard_after_forward,
        }
    return arguments
