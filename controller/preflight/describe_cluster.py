"""Write the page of `--dry-run --cluster`: where each role runs, and the memory of GPUs and hosts.

Config, Cluster --place--> sections "cluster", "memory" --> fits, or ConfigError after the page is printed
"""

from dataclasses import asdict
from itertools import groupby

from controller.actors.layout import sum_reserved
from controller.config import Config
from controller.preflight.cluster import (
    Cluster,
    Placement,
    cluster_in_words,
    groups_across_nodes,
    place,
    roles_on_node,
)
from controller.preflight.memory import (
    USABLE_SHARE,
    Memory,
    check_memory,
    fit_checkpointing,
    host_memory,
    measure,
    memory_lines,
    memory_totals,
)
from controller.preflight.page import Page
from workers.config.model import checkpointing_words
from workers.errors import ConfigError

AMD_CARDS = ("MI300X",)


def print_cluster(
    config: Config, cluster: Cluster, page: Page, *, measured: bool = True
) -> None:
    """Write placement, memory and whether the run fits. `measured`: memory too. Raises ConfigError if it does
    not.
    """
    page.begin("cluster", **asdict(cluster))
    try:
        placement = place(config, cluster)
    except ConfigError:
        page.write("fits: no", fits="no")
        raise
    page.write(*placement_lines(config, cluster, placement), nodes_of_ranks=placement.pools)
    if not cluster.gpus:
        cpus = f"{sum_reserved(config, 'CPU'):g} of {cluster.nodes * cluster.cpus:g}"
        page.write(f"fits: yes (CPUs: {cpus})", fits="yes")
        return
    page.begin("memory", "memory, measured on a simulated GPU; GiB")
    if measured and config.model.gradient_checkpointing == "auto":
        config = fit_checkpointing(config, cluster.gpu_gib)
        page.write(checkpointing_words(config.model))
    memory = measure(config) if measured else Memory({}, "--no-measure")
    if not memory.roles:
        gpus = f"{sum_reserved(config, 'GPU'):g} of {cluster.nodes * cluster.gpus}"
        page.write(
            f"not measured: {memory.problem}",
            f"fits: GPUs yes ({gpus}), memory unknown",
            fits="unknown",
        )
        return
    host = host_memory(
        config, memory, ranks=len(roles_on_node(config, placement, 0).get("policy", []))
    )
    sizes = ", ".join(
        f"{role} {measurement['sizes']['parameters']:,}"
        for role, measurement in memory.roles.items()
    )
    page.write(
        f"parameters: {sizes}",
        *memory_lines(config, memory, host, cluster),
        passes=memory.passes,
        host=host,
        usable=USABLE_SHARE * cluster.gpu_gib,
        problem=memory.problem,
    )
    totals = memory_totals(config, memory, host, cluster)
    try:
        check_memory(config, memory, host, cluster)
    except ConfigError:
        page.write(f"fits: no ({totals})", fits="no")
        raise
    if memory.problem:
        page.write(f"fits: training unknown ({totals})", fits="unknown")
    else:
        page.write(f"fits: yes ({totals})", fits="yes")


def placement_lines(config: Config, cluster: Cluster, placement: Placement) -> list[str]:
    """Write a line per node or range of idle nodes, with notes."""
    lines = [cluster_in_words(cluster)]
    node_roles = [
        (node, _roles_in_words(roles_on_node(config, placement, node)))
        for node in range(cluster.nodes)
    ]
    for words, nodes in groupby(node_roles, key=lambda item: item[1]):
        numbers = [node for node, _ in nodes]
        lines.append(f"{_numbers('node', numbers)}: {words or 'idle'}")
    if config.engine_range.is_elastic:
        engines = config.engines + len(placement.further_engines)
        lines.append(f"there is room for {engines} of {config.engine_range.words}")
    across = groups_across_nodes(config, placement)
    if across:
        lines.append(
            f"note: {across} groups of policy.parallel.context_parallel * tensor_parallel ranks lie on "
            "several nodes, where every layer waits for the network"
        )
    if cluster.gpu in AMD_CARDS:
        lines.append(
            f"note: gpu={cluster.gpu} is predicted only, because runs on ROCm are not supported"
        )
    return lines + (
        [f"note: {note}" for note in _sharding_notes(config, placement)]
        if cluster.gpus
        else []
    )


def _sharding_notes(config: Config, placement: Placement) -> list[str]:
    """Say what sharding costs where ranks lie. The default shards over all ranks, as torchtitan's does."""
    policy = config.policy
    nodes = len(set(placement.pools["training"]))
    notes = []
    if policy.parallel.expert_parallel > 1 and nodes == 1:
        notes.append(
            f"policy.parallel.expert_parallel={policy.parallel.expert_parallel} on one node: nothing hides "
            "the all-to-alls of a layer, but FSDP2 hides its gathers. Set 1 if memory allows and "
            "micro-batches have more than about 5,000 tokens"
        )
    if policy.parallel.replicate == 1 < nodes and policy.data_parallel % nodes == 0:
        notes.append(
            f"policy.parallel.replicate=1 gathers each layer over {nodes} nodes. replicate={nodes} gathers "
            f"within a node, and takes {nodes} times the memory for weights, gradients and optimiser state"
        )
    if (
        policy.parallel.pipeline_parallel > 1
        and policy.reshard_after_forward
        and policy.data_parallel > 1
    ):
        notes.append(
            "policy.reshard_after_forward=true gathers the layers of a pipeline stage twice a micro-batch. "
            "false gathers them once a mini-batch, and keeps them on the GPU"
        )
    return notes


def _roles_in_words(roles: dict[str, list[int]]) -> str:
    return ", ".join(f"{role} {_range(numbers)}" for role, numbers in roles.items())


def _range(numbers: list[int]) -> str:
    return f"{numbers[0]}" if len(numbers) == 1 else f"{numbers[0]}..{numbers[-1]}"


def _numbers(word: str, numbers: list[int]) -> str:
    return f"{word} {numbers[0]}" if len(numbers) == 1 else f"{word}s {_range(numbers)}"
