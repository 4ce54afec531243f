"""Split layers into pipeline stages, minimising the cost of the most expensive stage: exact, by dynamic
programming.

Imports no torch: dry runs use it too.
"""

from collections.abc import Sequence
from itertools import pairwise

from workers.errors import ConfigError

FORWARD_AND_BACKWARD = 3.0
"""Cost of a trained layer, as a multiple of its forward pass."""


def relative_costs(
    layers: Sequence[float], head: float, *, recomputed: float
) -> tuple[list[float], float]:
    """Return (costs of the layers, cost of the output layer) for `split_layers`, from the weights that a
    token uses.

    recomputed: share of a layer's forward pass that its backward pass repeats.

    The output layer recomputes its logits in backward (`logprobs.py`). Attention itself costs the same in all
    layers, and the embedding is a look-up: both are left out.
    """
    factor = FORWARD_AND_BACKWARD + recomputed
    return [factor * layer for layer in layers], (FORWARD_AND_BACKWARD + 1.0) * head


def split_layers(costs: Sequence[float], last: float, parts: int) -> list[range]:
    """Split layers into consecutive non-empty ranges, minimising the cost of the most expensive one.

    costs: of each layer. last: of the output layer, in the last part. Raises ConfigError for fewer layers
    than parts.
    """
    layers = len(costs)
    if layers < parts:
        raise ConfigError(
            f"policy.parallel.pipeline_parallel asks for {parts} parts of a model that has {layers} layers. "
            "Lower it."
        )
    sums = [0.0]
    for cost in costs:
        sums.append(sums[-1] + cost)
    # worst[stop]: cost of the most expensive part with layers before `stop` in the parts so far. begins: its
    # cut.
    worst = {stop: sums[stop] + last * (parts == 1) for stop in range(1, layers + 1)}
    begins: list[dict[int, int]] = [dict.fromkeys(worst, 0)]
    for part in range(1, parts):
        extra = last if part == parts - 1 else 0.0
        best = {}
        for stop in range(part + 1, layers + 1):
            choices = [
                (max(worst[start], sums[stop] - sums[start] + extra), start)
                for start in worst
                if start < stop
            ]
            if choices:
                best[stop] = min(choices)
        worst = {stop: cost for stop, (cost, _) in best.items()}
        begins.append({stop: start for stop, (_, start) in best.items()})
    cuts = [layers]
    for part in reversed(range(parts)):
        cuts.insert(0, begins[part][cuts[0]])
    return [range(start, stop) for start, stop in pairwise(cuts)]
