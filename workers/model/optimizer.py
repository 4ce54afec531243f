import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR

from workers.config import OptimizerConfig
from workers.errors import ConfigError


def make_optimizer(parameters: Iterable[nn.Parameter], config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over the trainable parameters, with weight decay on matrices only."""
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


def make_schedule(optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int) -> LambdaLR:
    """Return the schedule over `config.total_steps` optimiser steps, or over `total_steps` if that is 0.

    Raises ConfigError if a schedule that ends has no step left after warm-up.
    """
    last = config.total_steps or total_steps
    if config.schedule != "constant" and last <= config.warmup_steps:
        raise ConfigError(
            f"policy.optimizer.schedule={config.schedule} ends after {last} steps, within the warm-up of "
            f"{config.warmup_steps}. Raise policy.optimizer.total_steps or lower policy.optimizer.warmup_steps."
        )
    return LambdaLR(optimizer, lambda step: learning_rate_factor(step, config, last))


def learning_rate_factor(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the share of the peak learning rate at optimiser step `step`, counted from 0.

    Warm-up rises in equal steps, without a step at 0. Then, with progress x from 0 to 1 and the final ratio m: constant
    1, linear m + (1 - m)(1 - x), cosine m + (1 - m)(1 + cos(pi x)) / 2.
    """
    if step < config.warmup_steps:
        return (step + 1) / (config.warmup_steps + 1)
    if config.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - config.warmup_steps) / (total_steps - config.warmup_steps))
    remaining = 1.0 - progress if config.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * progress))
    return config.final_learning_rate_ratio + (1.0 - config.final_learning_rate_ratio) * remaining


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, dict[str, Tensor]]:
    """Return AdamW's tensors of every parameter, initialised before the first step: checkpoints always hold the same
    tensors.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if not optimizer.state[parameter]:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), dtype=torch.float32, device=parameter.device),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
    return {parameter: optimizer.state[parameter] for group in optimizer.param_groups for parameter in group["params"]}


def resume_schedule(schedule: LambdaLR, steps: int) -> None:
    rates = [base * factor(steps) for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)]
    position = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates}
    schedule.load_state_dict(schedule.state_dict() | position)
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
