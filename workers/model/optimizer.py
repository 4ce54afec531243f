"""AdamW, its schedule, and its state in host memory.

`OffloadedAdamW.step`, by buckets of parameters, on three streams:

in        bucket 0 | bucket 1 | bucket 2             exp_avg and exp_avg_sq, from pinned memory
step                 bucket 0 | bucket 1 | bucket 2  AdamW, on the device
out                             bucket 0 | bucket 1  back to their places
"""

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from workers.config import OptimizerConfig
from workers.errors import ConfigError
from workers.model.copies import copies_of

BUCKET = 2**26
"""Elements of a bucket, unless one parameter has more: 512 MiB of float32 moments, and three buckets on the device."""
MOMENTS = ("exp_avg", "exp_avg_sq")


def make_optimizer(
    parameters: Iterable[nn.Parameter], config: OptimizerConfig, *, offload: bool = False
) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019) over the trainable parameters, with weight decay on matrices only.

    offload: keep its state in host memory.
    """
    trainable = [parameter for parameter in parameters if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim >= 2], "weight_decay": config.weight_decay},
        {"params": [p for p in trainable if p.ndim < 2], "weight_decay": 0.0},
    ]
    optimizer = OffloadedAdamW if offload else torch.optim.AdamW
    return optimizer(
        [group for group in groups if group["params"]],
        lr=config.learning_rate,
        betas=(config.beta1, config.beta2),
        eps=config.epsilon,
        fused=True,
    )


@dataclass
class Bucket:
    """Hold parameters of one group, and their moments [2, n] in pinned host memory."""

    group: dict[str, Any]
    parameters: list[nn.Parameter]
    host: Tensor

    def moments(self, flat: Tensor) -> Iterator[tuple[nn.Parameter, str, Tensor]]:
        """Yield views of `flat` [2, n] in the shape of each parameter's shard."""
        shards = [_shard(parameter) for parameter in self.parameters]
        for name, values in zip(MOMENTS, flat, strict=True):
            parts = values.split([shard.numel() for shard in shards])
            for parameter, shard, part in zip(self.parameters, shards, parts, strict=True):
                yield parameter, name, part.view(shard.shape)


class OffloadedAdamW(torch.optim.AdamW):
    """AdamW that keeps exp_avg and exp_avg_sq in host memory. A step equals AdamW's to the bit: it has no sums.

    `state` holds them in host memory, complete whenever `step` has returned.
    """

    param_groups: list[dict[str, Any]]

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        self._buckets = [bucket for group in self.param_groups for bucket in _buckets(group)]
        device = self._buckets[0].parameters[0].device
        self._arriving, self._leaving = copies_of(device), copies_of(device)
        with torch.no_grad():
            for bucket in self._buckets:
                for parameter, name, part in bucket.moments(bucket.host):
                    whole = torch.empty_like(parameter, device="cpu", requires_grad=False)
                    _shard(whole).set_(part)
                    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    self.state[parameter].setdefault("step", step)
                    self.state[parameter][name] = whole

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups, leaving = self.param_groups, deque[tuple[Tensor, Any]]()
        arriving = self._fetch(self._buckets[0])
        for bucket, following in zip(self._buckets, [*self._buckets[1:], None], strict=True):
            moments, copied = arriving
            if len(leaving) == 2:  # at most three buckets are on the device
                self._leaving.wait(leaving[0][1])
                leaving.popleft()
            if following is not None:
                arriving = self._fetch(following)
            self._arriving.wait(copied)
            kept = {parameter: dict(self.state[parameter]) for parameter in bucket.parameters}
            for parameter, name, part in bucket.moments(moments):
                self.state[parameter][name] = _like(parameter, part)
            self.param_groups = [{**bucket.group, "params": bucket.parameters}]
            super().step()
            self.state.update(kept)
            leaving.append((moments, self._leaving.copy(moments, bucket.host)))
        self.param_groups = groups
        self._leaving.finish()

    def _fetch(self, bucket: Bucket) -> tuple[Tensor, Any]:
        moments = torch.empty_like(bucket.host, device=bucket.parameters[0].device)
        return moments, self._arriving.copy(bucket.host, moments)


def _buckets(group: dict[str, Any]) -> Iterator[Bucket]:
    parts: list[list[nn.Parameter]] = []
    size = BUCKET
    for parameter in group["params"]:
        size += _shard(parameter).numel()
        if size > BUCKET or parameter.dtype != parts[-1][0].dtype:
            parts.append([])
            size = _shard(parameter).numel()
        parts[-1].append(parameter)
    for parameters in parts:
        size = sum(_shard(parameter).numel() for parameter in parameters)
        yield Bucket(group, parameters, pinned_zeros((2, size), parameters[0]))


def pinned_zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    zeros = torch.zeros(shape, dtype=like.dtype)
    if like.is_cuda and zeros.numel():  # torch's own pinned memory has sizes of powers of two: up to twice as much
        cuda: Any = torch.cuda.cudart()
        torch.cuda.check_error(int(cuda.cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0)))
    return zeros


def _shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return shard
    mesh, placements = parameter.device_mesh, parameter.placements
    return DTensor.from_local(
        shard, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
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
