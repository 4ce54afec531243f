"""Count the kernels of compiled graphs without a compiler: a backend of torch.compile for the simulated GPU.

    layer --dynamo--> graph --aot_autograd, inductor's decompositions and partition--> forward, backward --run node by
        node--> matrix products, attention, sorts, collectives: one kernel each, counted as in layers not compiled
                the rest: a kernel for each group of connected nodes between those

A group reads each of its inputs once and writes what others read. A sum over tokens, and a scatter, end a
group: what they need is computed again inside. Views are free. inductor also fuses groups that read the same
tensors, splits large groups, and reads rows that are too long for a block twice: none of these is modelled.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, fx
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._inductor.decomposition import select_decomp_table
from torch.utils._pytree import tree_leaves

LONG = 256
"""A sum of so many rows or more is not computed by the threads that compute their elements."""
ALONE = {"mm", "bmm", "addmm", "baddbmm", "_grouped_mm", "sort", "topk", "histc", "cumsum"}
ENDS = {"index_put", "index_put_", "scatter", "scatter_add", "index_add"}
SUMS = {"sum", "mean"}
LOOKUPS = {"index", "gather", "embedding", "index_select"}

Kernels = Counter[str]


class FusedGraph(fx.Interpreter):
    """tell: called with the bytes of each fused kernel. counts: called before each node, whether it counts
    alone.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        tell: Callable[[int], None],
        counts: Callable[[bool], None],
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self._tell, self._counts = tell, counts

    def run_node(self, n: fx.Node) -> Any:
        self._counts(is_alone(n))
        try:
            return super().run_node(n)
        finally:
            self._counts(True)

    def __call__(self, *args: Any) -> Any:
        result = self.run(*args)
        for moved in kernels(self.module.graph, self.env):
            self._tell(moved)
        self.env = {}
        return result


def name_of(node: fx.Node) -> str:
    return (
        node.target._schema.name.partition("::")[2]
        if isinstance(node.target, torch._ops.OpOverload)
        else ""
    )


def is_alone(node: fx.Node) -> bool:
    name = name_of(node)
    outside = isinstance(
        node.target, torch._ops.OpOverload
    ) and node.target.namespace not in (
        "aten",
        "prims",
    )
    return name in ALONE or "attn" in name or "attention" in name or outside


def kernels(graph: fx.Graph, values: dict[fx.Node, Any]) -> Iterator[int]:
    """Yield the bytes that each fused kernel reads and writes."""
    holder: dict[fx.Node, fx.Node] = {}  # of each node's memory
    level: dict[fx.Node, int] = {}
    inputs: dict[fx.Node, Counter[fx.Node]] = defaultdict(Counter)  # bytes read by holder
    group: dict[fx.Node, fx.Node] = {}
    ends, constants, readers = set(), set(), defaultdict(set)

    def root(node: fx.Node) -> fx.Node:
        while group[node] is not node:
            node = group[node]
        return node

    for node in graph.nodes:
        made = tensors(values.get(node))
        if node.op == "output":
            for read in node.all_input_nodes:
                readers[holder.get(read, read)].add(node)
        if not made or node.op == "output":
            continue
        given = [read for read in node.all_input_nodes if tensors(values[read])]
        memory = {
            tensor.untyped_storage()._cdata: read
            for read in given
            for tensor in tensors(values[read])
        }
        same = memory.get(made[0].untyped_storage()._cdata)
        if same is not None:
            holder[node] = holder[same]
            if name_of(node) == "copy_":  # the result replaces an input
                readers[holder[node.args[1]]].add(node)
            continue
        holder[node] = node
        size = sum(tensor.nbytes for tensor in made)
        for read in given:
            held = holder[read]
            if held in constants:
                continue
            whole = sum(tensor.nbytes for tensor in tensors(values[read]))
            inputs[node][held] += min(whole, size) if name_of(node) in LOOKUPS else whole
            readers[held].add(node)
        level[node] = max(
            (
                level[held] + (held in ends or held not in group)
                for held in inputs[node]
                if held in level
            ),
            default=0,
        )
        if node.op == "placeholder":
            level[node] = -1
        elif not given and not is_alone(node):
            constants.add(node)
        if node.op == "placeholder" or node in constants or is_alone(node):
            continue
        group[node] = node
        if ends_a_group(node, values):
            ends.add(node)
            continue
        for held in inputs[node]:
            if held in group and held not in ends and level[held] == level[node]:
                group[root(held)] = node

    members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in group:
        members[node if node in ends else root(node)].append(node)
    for nodes in members.values():
        inside = set(nodes)
        written = sum(
            nbytes(values[node])
            for node in nodes
            if readers[node] - inside - ends or node in ends
        )
        if not written:
            continue  # computed again where a sum needs it
        if nodes[0] in ends:
            written *= 1 + (name_of(nodes[0]) in ENDS)  # zeros first
            inside |= behind(nodes[0], inputs, group, ends, level)
        read: Counter[fx.Node] = Counter()
        for node in inside:
            for held, size in inputs[node].items():
                if held not in inside:
                    read[held] = min(read[held] + size, nbytes(values[held]))
        yield written + read.total()


def behind(node: fx.Node, inputs: Any, group: Any, ends: Any, level: Any) -> set[fx.Node]:
    """Return what a sum computes again: the nodes of its level that lead to it."""
    found: set[fx.Node] = set()
    todo = [node]
    while todo:
        for held in inputs[todo.pop()]:
            if (
                held in group
                and held not in ends
                and level[held] == level[node]
                and held not in found
            ):
                found.add(held)
                todo.append(held)
    return found


def ends_a_group(node: fx.Node, values: dict[fx.Node, Any]) -> bool:
    name = name_of(node)
    if name not in SUMS:
        return name in ENDS
    (before,), after = tensors(values[node.args[0]]), values[node]
    kept_last = len(node.args) > 1 and before.dim() - 1 not in [
        dim % before.dim() for dim in node.args[1] or range(before.dim())
    ]
    return kept_last and before.numel() >= LONG * after.numel()


def tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]


def nbytes(value: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors(value))


def backend(tell: Callable[[int], None], counts: Callable[[bool], None]) -> Any:
    def compiled(module: fx.GraphModule, _: Any) -> Any:
        graph = FusedGraph(module, tell, counts)

        def call(args: list[Any]) -> Any:
            given = list(args)
            args.clear()
            return graph(*given)

        call._boxed_call = True  # type: ignore[attr-defined]
        return call

    return aot_autograd(
        fw_compiler=compiled,
        bw_compiler=compiled,
        inference_compiler=compiled,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=select_decomp_table,
    )
