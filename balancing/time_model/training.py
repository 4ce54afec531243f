"""Predict seconds of a step's passes, optimiser steps and collectives on training ranks.

Constants come from the roofline of whole layers (docs/gpu-roofline.md): bytes that elementwise kernels move
for each token, layer and hidden unit, and for each parameter of a micro-batch, and kernels of a layer. They
are fits to its rows of 1.5B, 7B, 32B and 30B-A3B, which agree within 10 %.
"""

from dataclasses import dataclass
from functools import lru_cache
from math import ceil
from typing import Any, NamedTuple

from balancing.basics.grouping import Floats
from balancing.basics.windows import Window, attended_squares
from balancing.time_model.inputs import Layout, ModelShape, Workload
from balancing.time_model.machine import Efficiency, Machine

ELEMENTWISE = (600.0, 295.0)
"""Bytes in half precision that a token moves per layer and hidden unit, forward and backward: eager,
compiled.
"""
OF_WORDS = 10.0
"""Bytes that a token's log-probs move per word of the vocabulary, forward and backward."""
OF_PARAMETERS = 21.0
"""Bytes a parameter of a micro-batch: gathered weights are copied, gradients are cast and added."""
OF_GATHER = 10.0
"""Bytes a parameter of a layer that a GPU without other ranks moves to gather it: float32 is read and
its cast written (4 + 2), the cast is read and copied (2 + 2). Counted on the simulated GPU
(docs/gpu-roofline.md).
"""
OF_OPTIMIZER = 36.0
"""Bytes a parameter of AdamW in float32: read weights, gradient (twice) and moments, write weights and
moments.
"""
KERNELS = (160.0, 80.0)
"""Kernels of a layer and micro-batch, forward and backward: eager, compiled."""
FILL = 0.95
"""Share of the cap that micro-batches fill."""


@dataclass(frozen=True)
class Training:
    """Seconds of a step. update, forward: of micro-steps, without collectives. bound: what they wait for
    mostly.
    """

    update: float
    forward: float
    collectives: float
    optimizer: float
    bound: str


class Shares(NamedTuple):
    """One rank's tokens and squared tokens of an epoch, and micro-batches of a step."""

    tokens: float
    squared: float
    micro_batches: int


@lru_cache(maxsize=256)
def _squares(workload: Workload, windows: tuple[Window, ...]) -> tuple[float, float, float]:
    """Return `Workload.squares`, and those of the longest sample."""
    return *workload.squares(windows), float(attended_squares(workload.longest, windows))


def shares(layout: Layout, workload: Workload, windows: tuple[Window, ...] = ()) -> Shares:
    """Count a rank's part, at least the longest sequence. Prompts count once in every micro-batch that has
    them. windows: of the model's layers.
    """
    tokens = workload.tokens
    repeated = workload.repeated_tokens
    squared, repeated_squared, longest_squared = _squares(workload, windows)
    if layout.shared_prompts:
        size = workload.samples_per_prompt
        groups = workload.samples / workload.samples_per_prompt
        cap = layout.max_tokens * layout.cp
        group = (tokens - repeated) / groups
        pieces = min(size, max(1.0, group / cap, layout.dp / groups))
        saved = (size - pieces) / max(1, size - 1)
        tokens = tokens - saved * repeated
        squared = squared - saved * repeated_squared
    longest = workload.longest
    tokens = max(tokens / layout.dp, longest)
    squared = max(squared / layout.dp, longest_squared)
    micro_batches = (
        tokens * workload.epochs / workload.updates / (layout.max_tokens * layout.cp * FILL)
    )
    return Shares(
        tokens / layout.cp,
        squared / layout.cp,
        max(1, ceil(micro_batches)) * workload.updates,
    )


def training(
    shape: ModelShape,
    layout: Layout,
    workload: Workload,
    machine: Machine,
    efficiency: Efficiency,
) -> Training:
    """Predict all passes of a step on the busiest rank."""
    part = shares(layout, workload, shape.windows)
    count = part.micro_batches
    micro = max(1, part.micro_batches // workload.updates)
    terms = micro_step_terms(
        shape,
        layout,
        machine,
        part.tokens * workload.epochs,
        part.squared * workload.epochs,
    )
    products = float(terms[0]) / efficiency.matmul
    attention = float(terms[1]) / efficiency.attention
    held = held_parameters(shape, layout)
    memory = 1e9 * machine.bandwidth * efficiency.elementwise
    copies = held * OF_PARAMETERS * count / memory * (layout.dp * layout.cp > 1)
    copies += repeated_gather_bytes(shape, layout, workload.updates, count) / memory
    moved = float(terms[2]) / efficiency.elementwise
    device = {"FLOPs": products, "attention": attention, "memory": moved + copies}
    computed = sum(device.values())
    launches = count * float(terms[3]) * machine.kernel
    bubble = 1 + (layout.pp - 1) / (layout.virtual_stages * micro)
    launches = max(0.0, launches - computed) if machine.launches_ahead else launches
    update = (computed + launches) * bubble + count * machine.micro_batch
    of_products, of_attention = _passes(shape, layout)
    forward = (
        (products / of_products + attention / of_attention + (moved + launches) / 3)
        / workload.epochs
        * bubble
    )
    forward += machine.micro_batch
    device["host"] = launches + count * machine.micro_batch
    states = shape.parameters * shape.trained_share * layout.replicate / layout.ranks
    optimizer = workload.updates * states * OF_OPTIMIZER / memory
    exposed = _collectives(shape, layout, workload, machine, efficiency, part, computed)
    bound = (
        "collectives" if exposed > computed else max(device, key=lambda name: device[name])
    )
    crowd = machine.contention ** layout.crowded(layout.ranks)
    models = workload.trained_models * crowd
    passes = workload.forward_passes * crowd
    return Training(
        update * models,
        forward * passes,
        exposed * workload.trained_models,
        optimizer * models,
        bound,
    )


def micro_step_terms(
    shape: ModelShape,
    layout: Layout,
    machine: Machine,
    tokens: float | Floats,
    squared: float | Floats,
) -> tuple[Any, Any, Any, Any, Any]:
    """Return what a micro-step's seconds are linear in, for one rank's forward and backward pass.

    Seconds at peak of products and attention, seconds at peak bandwidth of elementwise kernels, kernels, and
    1. Their coefficients are 1 / efficiency, `Machine.kernel` and `Machine.micro_batch`. tokens, squared: of
    the sequences.
    """
    split = layout.tp * layout.pp
    peak = machine.flops(layout.dtype)
    of_products, of_attention = _passes(shape, layout)
    units = (
        ELEMENTWISE[layout.compiled] * shape.layers * shape.hidden
        + OF_WORDS * shape.vocabulary
    )
    moved = (
        units * layout.bytes / 2 * (1 + layout.recomputed / 3) / (1e9 * machine.bandwidth)
    )
    kernels = KERNELS[layout.compiled] * shape.layers / layout.pp
    return (
        tokens * (of_products * 2 * shape.active / (peak * split)),
        squared * (of_attention * shape.attention / (peak * split)),
        tokens * (moved / split),
        kernels + 0 * tokens,
        1 + 0 * tokens,
    )


def _passes(shape: ModelShape, layout: Layout) -> tuple[float, float]:
    """Return passes of products and of attention in an update. Frozen weights save products, but no
    attention.
    """
    return 2 + layout.recomputed + shape.trained_share, 3 + layout.recomputed


def held_parameters(shape: ModelShape, layout: Layout) -> float:
    """Return the parameters that a rank gathers, layer by layer, in a pass: modules with a state whole."""
    dense = shape.parameters - shape.expert_parameters - shape.state_parameters
    experts = shape.expert_parameters / max(layout.tp, layout.ep)
    return (dense / layout.tp + experts + shape.state_parameters) / layout.pp


def layer_parameters(shape: ModelShape, layout: Layout) -> float:
    """Return the parameters of a rank's layers: all but embedding and output layer."""
    words = shape.vocabulary * shape.hidden
    return max(0.0, held_parameters(shape, layout) - 2 * words / layout.tp / layout.pp)


def repeated_gather_bytes(
    shape: ModelShape, layout: Layout, updates: int, micro_batches: int
) -> float:
    """Return the bytes that a rank without others moves to gather freed layers again, in half precision.

    With `reshard_after_forward` it gathers them twice a micro-batch, else once an update. Other ranks' parts
    come by collectives, and a copy of all is counted with `OF_PARAMETERS`.
    """
    alone_on_a_gpu = layout.dp * layout.cp == 1 and layout.placement != "shared_memory"
    if not alone_on_a_gpu or not layout.reshard_after_forward or layout.dtype == "float32":
        return 0.0
    return (2 * micro_batches - updates) * OF_GATHER * layer_parameters(shape, layout)


def _collectives(
    shape: ModelShape, layout: Layout, workload: Workload, machine: Machine, efficiency: Efficiency,
    part: Shares, computed: float,
) -> float:  # fmt: skip
    """Return seconds that no computation hides. FSDP2's are hidden, those of tp, cp and ep are not."""
    count = part.micro_batches
    held = held_parameters(shape, layout)
    near = 1e9 * machine.link * efficiency.link
    gathers = 2 * count if layout.reshard_after_forward else workload.updates
    reductions = workload.updates if layout.defer_gradient_reduction else count
    sent, seconds = sharding_seconds(shape, layout, machine, gathers, reductions)
    hidden = sent / efficiency.link
    sharded = layout.dp * layout.cp // layout.replicate
    if layout.replicate > 1:
        across = machine.bus(layout.ranks, layout.gpus_per_node) * efficiency.link
        seconds += workload.updates * 2 * 4 * held * shape.trained_share / sharded / across
    sent = (
        part.tokens
        * workload.epochs
        * shape.hidden
        * layout.bytes
        * shape.layers
        / layout.pp
    )
    passes = 2 + layout.recomputed
    if layout.tp > 1:  # two all-reduces of a layer in each direction
        seconds += passes * 2 * 2 * sent * (1 - 1 / layout.tp) / near
    if layout.cp > 1:  # all-to-all of queries and outputs, keys and values
        bus = machine.bus(layout.cp * layout.tp, layout.gpus_per_node) * efficiency.link
        seconds += (
            passes * (2 + 2 * shape.kv_share) * sent / layout.tp * (1 - 1 / layout.cp) / bus
        )
    if layout.ep > 1:  # tokens to their experts and back
        across = (
            machine.network
            if layout.ep * layout.tp > layout.gpus_per_node
            else machine.link
        )
        copies = shape.experts_active * (1 - 1 / layout.ep)
        seconds += passes * 2 * sent * copies / (1e9 * across * efficiency.link)
    overlap = efficiency.overlap * computed if machine.launches_ahead else 0.0
    return seconds + max(0.0, hidden - overlap, hidden / shape.layers)


def sharding_seconds(
    shape: ModelShape, layout: Layout, machine: Machine, gathers: float, reductions: float
) -> tuple[float, float]:
    """Return seconds at peak bandwidth, and of latencies, of FSDP2's collectives over all layers."""
    sharded = layout.dp * layout.cp // layout.replicate
    if sharded == 1:
        return 0.0, 0.0
    numbers = gathers * layout.bytes + reductions * 4 * shape.trained_share
    sent = held_parameters(shape, layout) * numbers * (1 - 1 / sharded)
    waits = (gathers + reductions) * shape.layers / layout.pp * machine.latency
    return sent / machine.bus(sharded * layout.tp, layout.gpus_per_node), waits
