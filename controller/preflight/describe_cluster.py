"""Write the page of `--dry-run --cluster`: where each role runs, and the memory of GPUs and hosts.

Config, Cluster --place--> sections "cluster", "memory" --> fits, or ConfigError after the page is printed
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import groupby
from typing import Any

from controller.config import Config
from controller.config.model_files import read_model_files
from controller.preflight.cluster import Cluster, Placement, cluster_in_words, groups_across_nodes, place, roles_on_node
from controller.preflight.memory import (
    GIB,
    USABLE_SHARE,
    GpuMemory,
    Parts,
    Phase,
    check_host,
    check_memory,
    gpu_memory,
    host_memory,
    is_offloaded,
    of_stage,
)
from controller.preflight.model_shape import ModelShape, model_shape
from workers.errors import ConfigError


def print_cluster(config: Config, cluster: Cluster, *, measured: bool = False) -> None:
    """Print placement and memory; `measured`: also the engine's memory, measured without a GPU.

    Raises ConfigError if the run does not fit, or nothing could be measured.
    """
    placement = place(config, cluster)
    print("\n".join(["", "== cluster ==", *placement_lines(config, cluster, placement)]))
    if not cluster.gpus:
        return
    shape = model_shape(config.model_description())
    others = other_shapes(config)
    memory = gpu_memory(config, shape, cluster.gpu_gib, others)
    first = roles_on_node(config, placement, 0)
    ranks = len(first.get("policy", []))
    host = host_memory(config, shape, ranks=ranks, others=others)
    sizes = [f"{shape.parameters:,} parameters", *(f"{role} {each.parameters:,}" for role, each in others.items())]
    heading = f"== memory, estimated for {', '.join(sizes)}; GiB =="
    print("\n".join(["", heading, *memory_lines(config, memory, host, cluster)]))
    if measured:
        heading = f"== memory, measured on tensors without numbers with {LAYERS[0]} and {LAYERS[1]} layers; GiB =="
        print("\n".join(["", heading, *measured_lines(measure(config, list(memory.phases)))]))
    check_memory(config, memory, cluster.gpu_gib)
    check_host(host, cluster.memory_gib)


def other_shapes(config: Config) -> dict[str, ModelShape]:
    """Return model shapes of the training roles other than the policy. Raises as `model_shape` does."""
    models = {
        "reference": ("reference.path", config.reference_model),
        "critic": ("critic.path", config.critic_model),
        "reward_model": ("reward.model.path", config.reward_model),
    }
    shapes = {}
    for role in config.training_roles[1:]:
        key, model = models[role]
        shape = model_shape(read_model_files(model.path, key).description, key)
        shapes[role] = shape if role == "reference" else shape.with_value_head()
    return shapes


def placement_lines(config: Config, cluster: Cluster, placement: Placement) -> list[str]:
    """Write a line per node or range of idle nodes, with notes."""
    lines = [cluster_in_words(cluster)]
    found = [(node, _roles_in_words(roles_on_node(config, placement, node))) for node in range(cluster.nodes)]
    for words, nodes in groupby(found, key=lambda item: item[1]):
        numbers = [node for node, _ in nodes]
        lines.append(f"{_numbers('node', numbers)}: {words or 'idle'}")
    across = groups_across_nodes(config, placement)
    if across:
        lines.append(
            f"note: {across} groups of policy.parallel.context_parallel * tensor_parallel ranks lie on several nodes, "
            "where every layer waits for the network"
        )
    return lines


def _roles_in_words(roles: dict[str, list[int]]) -> str:
    return ", ".join(f"{role} {_range(numbers)}" for role, numbers in roles.items())


def _range(numbers: list[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}..{numbers[-1]}"


def _numbers(word: str, numbers: list[int]) -> str:
    return f"{word} {numbers[0]}" if len(numbers) == 1 else f"{word}s {_range(numbers)}"


def memory_lines(config: Config, memory: GpuMemory, host: Parts, cluster: Cluster) -> list[str]:
    """Write the memory of a GPU in training and generation, and of the first node's host."""
    room = USABLE_SHARE * cluster.gpu_gib
    lines = [
        f"a GPU while training, in the fullest phase, {memory.fullest.name}: {_sum(memory.training)} of {room:.1f} "
        "usable",
        f"a GPU while generating: {_sum(memory.generating)} of {room:.1f} usable",
        f"an engine: {memory.engine_weights:.1f} of weights on each GPU, room for {memory.kv_tokens:,} tokens; the "
        f"longest sequence has {config.max_model_tokens:,}",
    ]
    limit = f" of {cluster.memory_gib:g}" if cluster.memory_gib else ""
    return [*lines, f"host memory of node 0: {_sum(host)}{limit}"]


def _sum(parts: Parts) -> str:
    terms = " + ".join(f"{name} {gib:.1f}" for name, gib in parts.items())
    return f"{terms} = {sum(parts.values()):.1f}"


LAYERS = (3, 4)
"""Layers of a model that is measured. From three on each adds the same; with two, none is gathered ahead."""
TIMEOUT_S = 600


@dataclass(frozen=True)
class Measured:
    """Measured GiB of a GPU in one pass of a role, or the reason for missing it, with the estimate."""

    phase: str
    estimated: float
    gib: float = 0.0
    problem: str = ""


def measure(config: Config, phases: list[Phase], layers: tuple[int, ...] = LAYERS) -> list[Measured]:
    """Measure every phase of the estimate. Raises ConfigError if the measuring process does not answer.

    In a pipeline, the larger of the first and the last stage counts, each with the most layers of any stage.
    """
    stages = config.policy.parallel.pipeline_parallel
    found = [_beside(phases, run_trace(request(config, phases, layers, stage))) for stage in sorted({0, stages - 1})]
    return [max(of_stages, key=lambda each: (bool(each.problem), each.gib)) for of_stages in zip(*found, strict=True)]


def request(config: Config, phases: list[Phase], layers: tuple[int, ...] = LAYERS, stage: int = 0) -> dict[str, Any]:
    """Build the request for `workers.model.memory_trace.trace`. stage: pipeline stage to measure."""
    parallel = config.policy.parallel
    virtual = parallel.virtual_stages
    fewest = -(-layers[0] // virtual) * virtual  # as many in each part of a stage
    return {
        "ranks": config.training_workers,
        "rank": stage * (config.training_workers // parallel.pipeline_parallel),
        "layers": [fewest + virtual * (count - layers[0]) for count in layers],
        "longest": config.longest_sequence,
        "parallel": asdict(config.policy.parallel),
        "reshard_after_forward": config.policy.reshard_after_forward,
        "entropy_coefficient": config.algorithm.loss.entropy_coefficient,
        "roles": {role: _role(config, role, phases) for role in config.training_roles},
    }


def _role(config: Config, role: str, phases: list[Phase]) -> dict[str, Any]:
    models = {
        "policy": ("model.path", config.model),
        "reference": ("reference.path", config.reference_model),
        "critic": ("critic.path", config.critic_model),
        "reward_model": ("reward.model.path", config.reward_model),
    }
    key, model = models[role]
    dtype = "bfloat16" if model.dtype == "auto" else model.dtype
    chunk = model.chunk_tokens("cuda")
    sharing = config.policy.parallel.context_parallel
    description = dict(read_model_files(model.path, key).description)
    return {
        "description": description,
        "layers": of_stage(config, model_shape(description, key)).layers,
        "model": asdict(model) | {"dtype": dtype, "logprob_chunk_tokens": chunk},
        "head": "lm" if role in ("policy", "reference") else "value",
        "trains": role in ("policy", "critic"),
        "tokens": {each.call: each.tokens * sharing for each in phases if each.role == role},
        "cpu_offload": is_offloaded(config, role),
    }


def run_trace(asked: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Run the trace in a separate process. Raises ConfigError, with its last output, if it fails."""
    process = subprocess.run(
        [sys.executable, "-m", "workers.model.memory_trace"],
        input=json.dumps(asked),
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "TOKENIZERS_PARALLELISM": "false"},
        text=True,
        capture_output=True,
        timeout=TIMEOUT_S,
    )
    if process.returncode or not process.stdout.strip():
        words = (process.stderr.strip().splitlines() or ["no word"])[-1]
        raise ConfigError(f"--measure: the measuring process ended with {process.returncode}: {words}")
    answer: dict[str, dict[str, Any]] = json.loads(process.stdout.splitlines()[-1])
    return answer


def _beside(phases: list[Phase], found: Mapping[str, Mapping[str, Any]]) -> Iterator[Measured]:
    """Return each phase's own peak, and the memory that other roles keep."""
    for phase in phases:
        estimated = sum(phase.parts.values())
        problems = [f"{role}: {each['problem']}" for role, each in found.items() if "problem" in each]
        if problems:
            yield Measured(phase.name, estimated, problem=problems[0])
            continue
        kept = sum(each["states"] for role, each in found.items() if role != phase.role)
        yield Measured(phase.name, estimated, (found[phase.role][phase.call] + kept) / GIB)


def measured_lines(measured: list[Measured]) -> list[str]:
    """Write a line per phase."""
    return [_line(each) for each in measured]


def _line(each: Measured) -> str:
    if each.problem:
        return f"{each.phase}: estimated {each.estimated:.1f}, not measured: {each.problem}"
    above = each.estimated / each.gib - 1
    return f"{each.phase}: measured {each.gib:.1f}, estimated {each.estimated:.1f} ({above:+.0%})"
