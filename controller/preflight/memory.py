"""Measure the GPU memory of a run without a GPU, and compare it with a described cluster.

    Config --request--> workers.model.memory.memory_trace, in its own process, or the user's cache --> Memory
    Memory, Cluster --memory_lines, check_memory--> lines of the page, or ConfigError

Roles compute in turn: during a pass, a GPU holds the pass and all roles' states. While engines sample, it
holds what all roles keep, and an engine's share, rollout.gpu_memory_utilization, unless engines have their
own GPUs. A tenth of a GPU stays free for unmeasured memory: CUDA contexts, NCCL buffers, kernel workspaces,
fragmentation.
"""

import json
import math
from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from controller.config import Config, TrainingConfig
from controller.config.cached_process import WORKERS, ask_module, cache_file, keep_answer
from controller.config.file import value_of
from controller.config.functions import source_file
from controller.observability.slow_work import log_if_slow
from controller.preflight.cluster import Cluster
from controller.preflight.trace_request import (
    LAYERS,
    is_offloaded,
    measured_role,
    offloads_optimizer,
    request,
)
from workers.config.model import LIGHTER, ROUNDED
from workers.errors import ConfigError

Checked = TypeVar("Checked", bound=TrainingConfig)
GIB = 2**30
USABLE_SHARE = 0.9
TIMEOUT_S = 600
ASLEEP_GIB, ASLEEP_EAGER_GIB = 1.0, 0.25
"""Of a sleeping engine on each GPU, with CUDA graphs and without: estimates, see docs/placement.md."""
GRADIENT_BYTES = 4
STATE_BYTES = {"float32": 8, "bfloat16": 4, "int8": 2.01}
"""Bytes of AdamW's moments for a parameter, by `state_dtype`. Other optimisers keep no more."""
HAVE_MOMENTS = ("adamw", "muon")
"""Optimisers with `state_dtype`."""

Parts = dict[str, float]
"""GiB by part."""


@dataclass(frozen=True)
class Memory:
    """Measured memory of all training roles.

    roles: by role, as `workers.model.memory.memory_trace.trace` returns. problem: why measurements are
    missing.
    """

    roles: dict[str, dict[str, Any]]
    problem: str = ""

    @property
    def passes(self) -> dict[str, Parts]:
        """Memory of each role and of the pass, on the largest stage, by pass such as `policy.update`."""
        if self.problem:
            return {}
        by_pass: dict[str, Parts] = {}
        for role, measured in self.roles.items():
            for stage, peaks in enumerate(measured["stages"]):
                for call in [call for call in peaks if call != "states"]:
                    parts = self._kept(stage) | {
                        "the pass": (peaks[call] - peaks["states"]) / GIB
                    }
                    by_pass[f"{role}.{call}"] = max(
                        by_pass.get(f"{role}.{call}", {}), parts, key=_total
                    )
        return by_pass

    @property
    def kept(self) -> Parts:
        """Memory that each role keeps between passes, on the largest stage."""
        stages = [] if self.problem else range(len(self.roles["policy"]["stages"]))
        return max(map(self._kept, stages), key=_total, default={})

    def _kept(self, stage: int) -> Parts:
        state_gib = {
            role: measured["stages"][stage]["states"] / GIB
            for role, measured in self.roles.items()
        }
        return {role: gib for role, gib in state_gib.items() if gib > 0}


def _total(parts: Parts) -> float:
    return sum(parts.values())


def fit_checkpointing(config: Checked, gpu_gib: float) -> Checked:
    """Decide model.gradient_checkpointing=auto: the least recomputation with which all updates fit a GPU.

    Layer by layer where all layers of the roles agree, see `model.recompute_num_layers`. gpu_gib: 0 on CPUs.
    """
    model = config.model
    if model.gradient_checkpointing != "auto" or not gpu_gib:
        return _with(config, "none") if model.gradient_checkpointing == "auto" else config
    room = USABLE_SHARE * gpu_gib
    needed = math.inf
    for mode in (
        ("selective", "full") if model.activation_offload else ("none", "selective", "full")
    ):
        memory = measure(_with(config, mode))
        lighter = needed
        needed = max(
            (
                _total(parts)
                for name, parts in memory.passes.items()
                if name.endswith(".update")
            ),
            default=0.0,
        )
        if memory.problem:
            break
        if needed <= room and lighter < math.inf:
            layers = {
                measurement["sizes"]["layers"]
                for measurement in memory.roles.values()
                if "update" in measurement["stages"][0]
            }
            lighter_layers = (
                int(min(layers) * (room - needed) / (lighter - needed))
                if len(layers) == 1
                else 0
            )
            return _with(
                config, mode, min(layers) - lighter_layers if lighter_layers else 0
            )
        if needed <= room:
            return _with(config, mode)
    return _with(config, "full")


def _with(config: Checked, mode: str, layers: int = 0) -> Checked:
    decided = copy(config)
    decided.model = replace(
        config.model, gradient_checkpointing=mode, recompute_num_layers=layers
    )
    return decided


def measure(config: TrainingConfig, layers: tuple[int, ...] = LAYERS) -> Memory:
    """Measure every pass of `config.limits`. Layers of two modes of gradient checkpointing lie between the
    modes.
    """
    mode = config.model.gradient_checkpointing
    count = config.model.recompute_num_layers
    heavier = _measure(_with(config, mode), layers)
    if not count or heavier.problem:
        return heavier
    lighter = _measure(_with(config, LIGHTER[mode]), layers)
    roles = heavier.roles if lighter.problem else lighter.roles
    return Memory(
        {
            role: _between(measurement, roles[role], count)
            for role, measurement in heavier.roles.items()
        }
    )


def _between(
    heavier: dict[str, Any], lighter: dict[str, Any], count: int
) -> dict[str, Any]:
    share = max(0.0, 1 - count / heavier["sizes"]["layers"])
    stages = []
    for stage, lighter_stage in zip(heavier["stages"], lighter["stages"], strict=True):
        stages.append(
            {
                name: size + share * (lighter_stage[name] - size)
                for name, size in stage.items()
            }
        )
    return heavier | {"stages": stages}


def _measure(config: TrainingConfig, layers: tuple[int, ...]) -> Memory:
    """Measure, or take the answer to the same request from the cache."""
    trace_request = request(config, layers)
    answer_file = _cache_file(trace_request)
    if answer_file.is_file():
        return Memory(json.loads(answer_file.read_text()))
    with log_if_slow(
        print, "measuring the memory on a simulated GPU, once for this layout"
    ):
        memory = _run_trace(trace_request)
    if not memory.problem:
        keep_answer(answer_file, json.dumps(memory.roles))
    return memory


def _state_bytes(config: TrainingConfig, role: str) -> float:
    """Return the bytes of a role's optimiser state, for each parameter that is trained."""
    spec = measured_role(config, role)
    if not spec.learns:
        return 0
    optimizer = value_of(config, f"{spec.settings_section}.optimizer")
    return STATE_BYTES[optimizer.state_dtype]


def _cache_file(trace_request: Mapping[str, Any]) -> Path:
    functions = [
        role["optimizer"].get("function") for role in trace_request["roles"].values()
    ]
    source_files = [source_file(function) for function in functions if function]
    return cache_file(
        "memory",
        trace_request,
        sorted([*WORKERS.rglob("*.py"), *filter(None, source_files)]),
    )


def _run_trace(trace_request: Mapping[str, Any]) -> Memory:
    roles, problem = ask_module(
        "workers.model.memory.memory_trace", trace_request, TIMEOUT_S
    )
    if problem:
        return Memory({}, problem)
    problems = [
        f"{role}: {measurement['problem']}"
        for role, measurement in roles.items()
        if "problem" in measurement
    ]
    return Memory(roles, "".join(problems[:1]))


def host_memory(config: Config, memory: Memory, ranks: int) -> Parts:
    """Add up GiB of the first node's host memory, with `ranks` policy workers including rank 0."""
    sizes = {role: measurement["sizes"] for role, measurement in memory.roles.items()}
    # Share of a model.
    share = ranks * config.policy.parallel.replicate / config.training_workers
    parts = {
        "model as it is read": 4 * max(size["parameters"] for size in sizes.values()) / GIB
    }
    for role, size in sizes.items():
        if is_offloaded(config, role):
            trained = (GRADIENT_BYTES + _state_bytes(config, role)) * size["trained"]
            parts[role] = (size["weight_bytes"] + trained) * share / GIB
        elif offloads_optimizer(config, role):
            parts[role] = 8 * size["trained"] * share / GIB
    copied = sum(
        (4 + _state_bytes(config, role)) * size["trained"] for role, size in sizes.items()
    )
    if config.run.checkpoint_every:  # the copy being written, and a file of 1 GiB a rank
        parts["checkpoint"] = copied * share / GIB + ranks
    if config.run.peer_copies:
        # Two generations for each holding node. While the next is sent, a rank's memory and the object store
        # have it, and with several nodes also the neighbour's object store.
        copies = 4 if ranks == config.training_workers else 7
        parts["peer copies"] = copies * copied * share / GIB
    # Rank 0's copy, whole weights and deltas in the object store.
    if config.rollout.weight_sync == "delta":
        parts["weights for engines"] = 6 * sizes["policy"]["parameters"] / GIB
    if config.rollout_placement == "colocated":  # in pinned memory, also at level 2
        parts["sleeping engines"] = ranks * (
            ASLEEP_EAGER_GIB if config.rollout.enforce_eager else ASLEEP_GIB
        )
    if config.model.activation_offload:
        policy = sizes["policy"]
        parts["activations"] = (
            ranks
            * 2
            * policy["hidden"]
            * policy["layers"]
            * config.policy.max_tokens_per_micro_batch
            / GIB
        )
    return parts


@dataclass(frozen=True)
class Engine:
    """GiB of a GPU that an engine takes, and its weights among them. kv_tokens: tokens that fit into the
    rest.
    """

    share: float
    weights: float
    kv_tokens: int

    @classmethod
    def of(cls, config: Config, memory: Memory, gpu_gib: float) -> "Engine":
        """Of the policy's model in half precision."""
        share = config.rollout.gpu_share(config.rollout_placement) * gpu_gib
        gpus = config.rollout.tensor_parallel
        size = memory.roles["policy"]["sizes"]
        weights = 2 * size["parameters"] / gpus / GIB
        return cls(
            share,
            weights,
            max(0, int((share - weights) * GIB * gpus / (size["kv_bytes"] or 1))),
        )


def memory_lines(
    config: Config, memory: Memory, host: Parts, cluster: Cluster
) -> list[str]:
    """Write the memory of a GPU in every pass and in generation, and of the first node's host."""
    engine = Engine.of(config, memory, cluster.gpu_gib)
    room = USABLE_SHARE * cluster.gpu_gib
    lines = [
        f"{name.replace('_', ' ').replace('.', ' ')}: {_sum(parts)}"
        for name, parts in memory.passes.items()
    ]
    lines = [
        f"{line} of {room:.1f} usable"
        for line in [*lines, f"generation: {_sum(_generating(config, memory, engine))}"]
    ]
    limit = f" of {cluster.memory_gib:g}" if cluster.memory_gib else ""
    return [
        *([f"training was not measured: {memory.problem}"] if memory.problem else lines),
        f"an engine: {engine.weights:.1f} of weights on each GPU, room for {engine.kv_tokens:,} tokens. The "
        f"longest sequence has {config.max_model_tokens:,}",
        *_concurrency_lines(config, engine),
        f"host memory of node 0: {_sum(host)}{limit}",
    ]


def _concurrency_lines(config: Config, engine: Engine) -> list[str]:
    """Say that requests of an engine may outgrow its cache, if all of them are long."""
    fitting = engine.kv_tokens // config.max_model_tokens
    samples = math.ceil(config.sequences_per_step / max(1, config.engines))
    requests = min(config.rollout.max_concurrent, samples)
    if requests <= fitting:
        return []
    return [
        f"note: an engine runs up to {requests:,} requests (rollout.max_concurrent="
        f"{config.rollout.max_concurrent}), and its cache holds {fitting:,} of the longest. If most are that "
        "long, vLLM drops requests from the cache and computes them again. Lower rollout.max_concurrent, or "
        "raise rollout.gpu_memory_utilization"
    ]


def memory_totals(config: Config, memory: Memory, host: Parts, cluster: Cluster) -> str:
    """Write GiB used and usable of the fullest GPU and of the first node's host."""
    engine = Engine.of(config, memory, cluster.gpu_gib)
    used = max(map(_total, [*memory.passes.values(), _generating(config, memory, engine)]))
    limit = f" of {cluster.memory_gib:g}" if cluster.memory_gib else ""
    return (
        f"memory of a GPU: {used:.1f} of {USABLE_SHARE * cluster.gpu_gib:.1f} GiB usable, of host 0: "
        f"{_total(host):.1f}{limit} GiB"
    )


def _sum(parts: Parts) -> str:
    return f"{' + '.join(f'{name} {gib:.1f}' for name, gib in parts.items())} = {_total(parts):.1f}"


def _generating(config: Config, memory: Memory, engine: Engine) -> Parts:
    return ({} if config.rollout_placement == "apart" else memory.kept) | {
        "engine": engine.share
    }


def check_memory(config: Config, memory: Memory, host: Parts, cluster: Cluster) -> None:
    """Raise ConfigError, with advice, if the measured memory does not fit the cluster's GPUs and
    first node.
    """
    room = USABLE_SHARE * cluster.gpu_gib
    engine = Engine.of(config, memory, cluster.gpu_gib)
    name, parts = max(
        memory.passes.items(), key=lambda item: _total(item[1]), default=("", {})
    )
    if _total(parts) > room:
        largest = max(parts, key=lambda part: parts[part])
        raise ConfigError(
            f"training needs about {_total(parts):.1f} GiB of a GPU in {name}, {parts[largest]:.1f} of them "
            f"for {largest}, and {room:.1f} are to be used; {_advice(config, largest, name)}."
        )
    if engine.kv_tokens < config.max_model_tokens:
        raise ConfigError(
            f"rollout.gpu_memory_utilization={config.rollout.gpu_share(config.rollout_placement)} gives an "
            f"engine {engine.share:.1f} GiB of a GPU, its weights take {engine.weights:.1f}, and the rest "
            f"holds {engine.kv_tokens:,} tokens of the {config.max_model_tokens:,} of one sequence. Raise "
            "it, or rollout.tensor_parallel."
        )
    generating = _total(_generating(config, memory, engine))
    if generating > room:
        raise ConfigError(
            f"generation needs {engine.share:.1f} GiB of a GPU for an engine and "
            f"{generating - engine.share:.1f} for training states, but {room:.1f} are to be used. Lower "
            "rollout.gpu_memory_utilization, share the states over more ranks (policy.data_parallel), or "
            "set rollout.placement=apart."
        )
    if cluster.memory_gib and _total(host) > cluster.memory_gib:
        raise ConfigError(
            f"node 0 needs about {_total(host):.1f} GiB of host memory and has {cluster.memory_gib:g}. Use "
            "larger nodes, or fewer offloaded states on one (policy.cpu_offload)."
        )


def _advice(config: Config, largest: str, name: str) -> str:
    if largest != "the pass":
        changes = _smaller_states(config, largest)
        return "raise policy.data_parallel" + (
            f", or set {' or '.join(changes)}" if changes else ""
        )
    role, _, call = name.partition(".")
    cap = config.limits[f"{role.partition(' ')[0]}.{call}"].cap
    if name.endswith("update") and config.model.gradient_checkpointing == "none":
        return f"set model.gradient_checkpointing=auto or lower {cap}"
    return f"lower {cap} or model.logprob_chunk_tokens, or share a model over more GPUs (policy.parallel)"


def _smaller_states(config: Config, measured: str) -> list[str]:
    """List the settings with which a measured model keeps less on its GPU."""
    spec = measured_role(config, measured)
    key = f"{spec.settings_section}.cpu_offload"
    offload = value_of(config, key)
    if not spec.learns:
        return [] if offload else [f"{key}=true"]
    optimizer = value_of(config, f"{spec.settings_section}.optimizer")
    stronger = optimizer.offloads
    if offload in stronger:
        stronger = stronger[stronger.index(offload) + 1 :]
    changes = [f"{key}={stronger[0]}"] if stronger else []
    model = config.model
    if measured == "policy" and model.lora.rank:
        if model.base_dtype not in ROUNDED and not model.lora.sends_adapters:
            changes.append("model.base_dtype=nf4")
    elif (
        offload == "none"
        and optimizer.name in HAVE_MOMENTS
        and optimizer.state_dtype != "int8"
    ):
        changes.append(f"{spec.settings_section}.optimizer.state_dtype=int8")
    return changes
