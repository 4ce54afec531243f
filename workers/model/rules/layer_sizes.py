"""Sizes of heads and caches of a loaded configuration.

A module of its own: the planner loads Numba, and vLLM's search for its kernels on CPUs ends at llvmlite's
library, so engines import none of it.
"""

from typing import Any

from balancing.errors import CostModelError
from balancing.model_counts import LayerCounts, count_layers
from balancing.model_fields import Fields


def head_sizes(text: Any) -> list[int]:
    """Return the sizes of attention heads of a loaded configuration, ascending, none of latent attention."""
    return sorted({layer.head for layer in _layers(text)} - {0})


def kv_bytes(text: Any, tokens: int, *, windows: bool = True) -> int:
    """Return the bytes that an engine keeps of a sequence in half precision, keys, values and states, by a
    loaded configuration, or 0 if unknown.

    windows: False counts all tokens of layers that look back a limited way, as vLLM asks for where it does
    not free their blocks.
    """
    kept = 0
    for layer in _layers(text):
        reach = layer.window if windows and layer.window else tokens
        kept += layer.kv * min(tokens, reach) + layer.state
    return 2 * kept


def _layers(text: Any) -> list[LayerCounts]:
    try:
        return count_layers(Fields(text))
    except CostModelError:
        return []
