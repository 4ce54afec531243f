"""Estimate the GPU memory of a layout by a formula, to search layouts. A dry run of a cluster measures it.

Constants are fits to what `--dry-run --cluster` measures of Qwen2.5 7B and 32B, see
tests/balancing/time_model.
"""

from dataclasses import dataclass

from balancing.time_model.inputs import Layout, ModelShape
from balancing.time_model.training import held_parameters, layer_parameters

GIB = 2**30
KEPT, FROZEN = 12.0, 4.0
"""Bytes that stay of a trained parameter (weight and two moments in float32), and of a frozen one."""
ACTIVATIONS = 1.8
"""Numbers kept of a layer's token for each weight of the layer over the hidden size, without
recomputation.
"""
STREAMS = {0.0: 0.0, 0.3: 18.0, 0.8: 2.0, 1.0: 1.0}
"""Hidden states kept of a layer's token by `Layout.recomputed`. Tensor parallelism shares all but
the first.
"""


@dataclass(frozen=True)
class Needs:
    """trained, frozen: models of the policy's size. chunk: tokens whose logits exist at a time. longest: of
    an engine's sequence.
    """

    trained: int = 1
    frozen: int = 0
    chunk: int = 2048
    longest: int = 1


def training_gib(shape: ModelShape, layout: Layout, needs: Needs) -> tuple[float, float]:
    """Return GiB of a GPU that the training roles keep between passes, and in the largest pass, an update."""
    held = held_parameters(shape, layout)
    words = shape.vocabulary * shape.hidden
    sharded = layout.dp * layout.cp / layout.replicate
    trained = shape.trained_share * needs.trained
    # Ranks of tensor parallelism gather a module with a state whole, and keep their shards of it.
    kept = held - shape.state_parameters * (1 - 1 / layout.tp) / layout.pp
    resident = (
        kept
        / sharded
        * (KEPT * trained + FROZEN * (needs.frozen + needs.trained - trained))
    )
    layers = shape.layers / layout.pp
    layer = layer_parameters(shape, layout) / layers
    size = layout.bytes
    gathered = 2 * layer if layout.reshard_after_forward else held
    passing = (
        size * (gathered + 2.5 * words / layout.tp)
        + 8 * needs.chunk * shape.vocabulary / layout.tp
    )
    whole_gradients = held if layout.defer_gradient_reduction else kept / sharded
    gradients = 4 * layer + 4 * whole_gradients * shape.trained_share
    # Of all products of a layer.
    width = (shape.active - words) / shape.layers / shape.hidden
    token = layout.max_tokens * shape.hidden * size
    layer_activations = ACTIVATIONS * width * token / shape.hidden / layout.tp
    streams = STREAMS[layout.recomputed] * token
    streams = streams if layout.recomputed == 1 else streams / layout.tp
    # In a pipeline the first stage keeps as many micro-batches as there are stages.
    activations = (
        shape.layers * streams + layer_activations
        if layout.recomputed
        else shape.layers * layer_activations
    )
    return resident / GIB, (resident + passing + gradients + activations) / GIB


def engine_holds(shape: ModelShape, layout: Layout, needs: Needs) -> bool:
    """Return whether an engine has room for its weights and one sequence."""
    needed = layout.bytes * (shape.parameters + shape.kept(needs.longest))
    return bool(needed <= layout.engine_gib * GIB * layout.engine_tp)


def fullest_gib(shape: ModelShape, layout: Layout, needs: Needs) -> float:
    """Return GiB of the GPU that holds most, in an update or while engines generate."""
    kept, passing = training_gib(shape, layout, needs)
    return max(
        passing,
        kept + layout.engine_gib if layout.placement == "colocated" else layout.engine_gib,
    )
