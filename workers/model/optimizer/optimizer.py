"""The optimiser of an engine, its schedule, and AdamW's state in host memory. Muon: `muon`.

`OffloadedAdamW.step`, by buckets of parameters, on three streams:

in        bucket 0 | bucket 1 | bucket 2             exp_avg and exp_avg_sq, from pinned memory
step                 bucket 0 | bucket 1 | bucket 2  AdamW, on the device
out                             bucket 0 | bucket 1  back to their places
"""

import math
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from workers.config.optimizer import StepSettings
from workers.config.roles import OptimizerConfig
from workers.errors import ConfigError
from workers.errors import describe_error as named_error
from workers.model.copies import copies_of
from workers.model.optimizer.low_bit import LowBitAdamW, LowBitMuon
from workers.model.optimizer.muon import Muon
from workers.user_code.functions import load
from workers.user_code.process import RAISED

BUCKET = 2**26
"""Elements of a bucket, unless one parameter has more: 512 MiB of float32 moments, and three buckets on the
device.
"""
MOMENTS = ("exp_avg", "exp_avg_sq")
CHANNEL_PARAMETERS = frozenset(
    {"A_log", "D", "time_mix_key", "time_mix_receptance", "time_mix_value"}
)
"""Parameters of mixers that are not matrices, and that some models store in two dimensions or more."""


def make_optimizer(
    parameters: Iterable[tuple[str, nn.Parameter]],
    config: OptimizerConfig,
    matrices: Collection[nn.Parameter] = (),
    tower: Collection[nn.Parameter] = (),
    *,
    offload: bool = False,
) -> torch.optim.Optimizer:
    """Make `config.name` over the trainable parameters. matrices: those that Muon updates. tower: those of
    images.

    offload: keep AdamW's state in host memory. Raises ConfigError for a custom function that does not work.
    """
    named = {name: parameter for name, parameter in parameters if parameter.requires_grad}
    if config.name == "custom":
        return _custom_optimizer(named, config)
    by_group: dict[tuple[bool, bool, bool], list[nn.Parameter]] = defaultdict(list)
    # The first group's rate is the metric.
    ordered = sorted(named.items(), key=lambda item: item[1] in tower)
    for name, weight in ordered:
        decays = config.weight_decay_on == "all" or not is_vector(name, weight)
        own_rate = weight in tower and config.vision_learning_rate > 0
        by_group[config.name == "muon" and weight in matrices, decays, own_rate].append(
            weight
        )
    groups: list[dict[str, Any]] = [
        {"params": group, "weight_decay": config.weight_decay * decays}
        | ({"momentum": config.momentum} if is_muon else {})
        | ({"lr": config.vision_learning_rate} if own_rate else {})
        for (is_muon, decays, own_rate), group in by_group.items()
    ]
    if config.name == "sgd":
        momentum = config.momentum
        return torch.optim.SGD(
            groups, lr=config.learning_rate, momentum=momentum, nesterov=momentum > 0
        )
    options = {
        "lr": config.learning_rate,
        "betas": (config.beta1, config.beta2),
        "eps": config.epsilon,
    }
    if config.state_dtype != "float32":
        low_bit = LowBitMuon if config.name == "muon" else LowBitAdamW
        names = {parameter: name for name, parameter in named.items()}
        return low_bit(groups, state_dtype=config.state_dtype, names=names, **options)
    make = (
        Muon if config.name == "muon" else OffloadedAdamW if offload else torch.optim.AdamW
    )
    return make(groups, fused=True, **options)


def is_vector(name: str, parameter: Tensor) -> bool:
    """Return whether a parameter scales or shifts single channels, in whatever shape its module stores it.

    gpt-oss stacks the biases of its experts to [E, n], Jamba's `A_log` is [channels, states].
    """
    leaf = name.rpartition(".")[2]
    return parameter.ndim < 2 or leaf.endswith("bias") or leaf in CHANNEL_PARAMETERS


def _custom_optimizer(
    named: dict[str, nn.Parameter], config: OptimizerConfig
) -> torch.optim.Optimizer:
    setting = f"optimizer.function={config.function!r}"
    make = load("optimizer.function", config.function)[1]
    try:
        optimizer = make(list(named.items()), config)
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise ConfigError(
                f"{setting} returned {type(optimizer).__name__}. Return a torch.optim.Optimizer."
            )
        states = optimizer_state(optimizer)
    except RAISED as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"{setting}, tried on parameters that are DTensors, raised {named_error(error)}."
        ) from None
    names = {parameter: name for name, parameter in named.items()}
    for parameter, state in states.items():
        for part, value in state.items():
            alike = [
                (type(tensor), type(_shard(tensor))) for tensor in (value, parameter.data)
            ]
            if not isinstance(value, Tensor) or (value.ndim > 0 and alike[0] != alike[1]):
                raise ConfigError(
                    f"{setting}: its state {part!r} of {names[parameter]} is a {type(value).__name__}, which "
                    "checkpoints cannot reshard. Keep a number as a 0-d tensor, and all else like the "
                    "parameter, a DTensor."
                )
    return optimizer


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
    """AdamW that keeps exp_avg and exp_avg_sq in host memory. A step equals AdamW's to the bit: it has no
    sums.

    `state` holds them in host memory, complete whenever `step` has returned.
    """

    param_groups: list[dict[str, Any]]

    def __init__(self, groups: list[dict[str, Any]], **options: Any) -> None:
        super().__init__(groups, **options)
        self._buckets = [
            bucket for group in self.param_groups for bucket in _buckets(group)
        ]
        device = self._buckets[0].parameters[0].device
        self._arriving = copies_of(device)
        self._leaving = copies_of(device)
        with torch.no_grad():
            for bucket in self._buckets:
                for parameter, name, part in bucket.moments(bucket.host):
                    full_moment = torch.empty_like(
                        parameter, device="cpu", requires_grad=False
                    )
                    _shard(full_moment).set_(part)
                    step = torch.zeros((), dtype=torch.float32, device=parameter.device)
                    self.state[parameter].setdefault("step", step)
                    self.state[parameter][name] = full_moment

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        groups = self.param_groups
        leaving = deque[tuple[Tensor, Any]]()
        arriving = self._fetch(self._buckets[0])
        for bucket, following in zip(
            self._buckets, [*self._buckets[1:], None], strict=True
        ):
            moments, copied = arriving
            if len(leaving) == 2:  # at most three buckets are on the device
                self._leaving.wait(leaving[0][1])
                leaving.popleft()
            if following is not None:
                arriving = self._fetch(following)
            self._arriving.wait(copied)
            host_states = {
                parameter: dict(self.state[parameter]) for parameter in bucket.parameters
            }
            for parameter, name, part in bucket.moments(moments):
                self.state[parameter][name] = _like(parameter, part)
            self.param_groups = [{**bucket.group, "params": bucket.parameters}]
            super().step()
            self.state.update(host_states)
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
    # Torch's own pinned memory has sizes of powers of two: up to twice as much.
    if like.is_cuda and zeros.numel():
        cuda: Any = torch.cuda.cudart()
        torch.cuda.check_error(
            int(cuda.cudaHostRegister(zeros.data_ptr(), zeros.nbytes, 0))
        )
    return zeros


def _shard(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _like(parameter: nn.Parameter, shard: Tensor) -> Tensor:
    if not isinstance(parameter, DTensor):
        return shard
    mesh = parameter.device_mesh
    placements = parameter.placements
    return DTensor.from_local(
        shard,
        mesh,
        placements,
        run_check=False,
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def make_schedule(
    optimizer: torch.optim.Optimizer, config: OptimizerConfig, total_steps: int
) -> LambdaLR:
    """Return the schedule over `config.total_steps` optimiser steps, or over `total_steps` if that is 0.

    Raises ConfigError if a schedule that ends has no step left after warm-up.
    """
    last = config.total_steps or total_steps
    if config.schedule != "constant" and last <= config.warmup(last):
        raise ConfigError(
            f"policy.optimizer.schedule={config.schedule} ends after {last} steps, within the warm-up of "
            f"{config.warmup(last)}. Raise policy.optimizer.total_steps or lower "
            "policy.optimizer.warmup_steps."
        )
    custom_schedule = (
        load("optimizer.schedule_function", config.schedule_function)[1]
        if config.schedule == "custom"
        else None
    )
    return LambdaLR(
        optimizer, lambda step: learning_rate_factor(step, config, last, custom_schedule)
    )


def learning_rate_factor(
    step: int,
    config: OptimizerConfig,
    total_steps: int,
    custom_schedule: Callable[[int, int], float] | None = None,
) -> float:
    """Return the share of the peak learning rate at optimiser step `step`, counted from 0.

    Warm-up rises in equal steps, without a step at 0. Then, with progress x from 0 to 1 and the final ratio
    m: constant 1, linear m + (1 - m)(1 - x), cosine m + (1 - m)(1 + cos(pi x)) / 2. wsd is 1, then linear in
    the last `decay_ratio` of all steps (arXiv 2405.18392). custom_schedule: a custom schedule.
    """
    warmup = begin = config.warmup(total_steps)
    if step < warmup:
        return (step + 1) / (warmup + 1)
    if custom_schedule is not None:
        return float(custom_schedule(step, total_steps))
    if config.schedule == "constant":
        return 1.0
    if config.schedule == "wsd":
        begin = max(warmup, total_steps - max(1, round(config.decay_ratio * total_steps)))
    progress = min(1.0, max(0, step - begin) / (total_steps - begin))
    remaining = (
        0.5 * (1.0 + math.cos(math.pi * progress))
        if config.schedule == "cosine"
        else 1.0 - progress
    )
    return (
        config.final_learning_rate_ratio
        + (1.0 - config.final_learning_rate_ratio) * remaining
    )


def optimizer_state(optimizer: torch.optim.Optimizer) -> dict[nn.Parameter, dict[str, Any]]:
    """Return the state of every parameter, initialised before the first step: checkpoints always hold the
    same tensors.

    A step with zero gradients and without learning rate and decay makes what is missing. Its count of steps
    is set back to 0. With decay, SGD's first momentum would be that of the weights.
    """
    parameters = [
        parameter for group in optimizer.param_groups for parameter in group["params"]
    ]
    fresh = [parameter for parameter in parameters if not optimizer.state[parameter]]
    if fresh:
        old_settings = [_rate_and_decay(group) for group in optimizer.param_groups]
        optimizer.zero_grad(set_to_none=True)
        for parameter in fresh:
            parameter.grad = torch.zeros_like(parameter)
        for group, values in zip(optimizer.param_groups, old_settings, strict=True):
            group.update({name: 0 * value for name, value in values.items()})
        optimizer.step()
        for group, values in zip(optimizer.param_groups, old_settings, strict=True):
            group.update(values)
        optimizer.zero_grad(set_to_none=True)
        for parameter in fresh:
            for name, value in optimizer.state[parameter].items():
                optimizer.state[parameter][name] = 0 * value if name == "step" else value
    return {parameter: optimizer.state[parameter] for parameter in parameters}


def _rate_and_decay(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: group[name] for name in ("lr", "weight_decay") if name in group}


def clear_state(optimizer: torch.optim.Optimizer) -> None:
    """Set moments and counts of steps to 0, as before the first step."""
    for state in optimizer_state(optimizer).values():
        for value in state.values():
            value.zero_()


def _without_parameters(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


@contextmanager
def changed_groups(
    optimizer: torch.optim.Optimizer,
    config: OptimizerConfig,
    settings: StepSettings,
    vectors: Collection[nn.Parameter],
) -> Iterator[None]:
    """Inside, the parameter groups have the settings of one step. Raises ConfigError for one that they do not
    have.

    vectors: parameters of `is_vector`. A group of nothing else decays only if all parameters do.
    """
    groups = optimizer.param_groups
    old_settings = [_without_parameters(group) for group in groups]
    try:
        for group in groups:
            group.update(_changed(group, settings, config, vectors))
        yield
    finally:
        for group, values in zip(groups, old_settings, strict=True):
            group.update(values)


def _changed(
    group: dict[str, Any],
    settings: StepSettings,
    config: OptimizerConfig,
    vectors: Collection[nn.Parameter],
) -> dict[str, Any]:
    beta1, beta2 = group.get("betas", (None, None))
    changes: dict[str, Any] = {"lr": settings.learning_rate, "eps": settings.epsilon}
    if settings.beta1 is not None or settings.beta2 is not None:
        changes["betas"] = (
            beta1 if settings.beta1 is None else settings.beta1,
            beta2 if settings.beta2 is None else settings.beta2,
        )
    if settings.weight_decay is not None:
        decays = config.weight_decay_on == "all" or not set(vectors).issuperset(
            group["params"]
        )
        changes["weight_decay"] = settings.weight_decay * decays
    changes = {name: value for name, value in changes.items() if value is not None}
    if missing := sorted(changes.keys() - group.keys()):
        raise ConfigError(
            f"policy.optimizer.name={config.name}: it has no {missing[0]} to change. Leave it out."
        )
    return changes


def resume_schedule(schedule: LambdaLR, steps: int) -> None:
    rates = [
        base * factor(steps)
        for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
    ]
    position = {"last_epoch": steps, "_step_count": steps + 1, "_last_lr": rates}
    schedule.load_state_dict(schedule.state_dict() | position)
    for group, rate in zip(schedule.optimizer.param_groups, rates, strict=True):
        group["lr"] = rate
