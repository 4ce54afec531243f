"""The page of `--dry-run --cluster`: where every role goes on a described cluster, and what its GPUs and hosts hold.

Config, Cluster --place--> sections "cluster", "memory" --> fits, or ConfigError after the page is printed
"""

from itertools import groupby

from controller.config import Config
from controller.config.model_files import read_model_files
from controller.preflight.cluster import Cluster, Placement, cluster_in_words, groups_across_nodes, place, roles_on_node
from controller.preflight.measure import LAYERS, measure, measured_lines
from controller.preflight.memory import (
    USABLE_SHARE,
    GpuMemory,
    Parts,
    check_host,
    check_memory,
    gpu_memory,
    host_memory,
)
from controller.preflight.model_shape import ModelShape, model_shape


def print_cluster(config: Config, cluster: Cluster, *, measured: bool = False) -> None:
    """Print the placement and, where there are GPUs, their memory; `measured`: beside what the engine took without one.

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
    """Shapes of the models of the training roles beside the policy, by role. Raises as `model_shape` does."""
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
    """A line for each node or run of idle nodes, and what to know about them."""
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
    """The memory of a GPU in training and in generation, and the first node's host memory."""
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
