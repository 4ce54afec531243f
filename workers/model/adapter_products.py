"""LoRA's products with as few kernels as plain torch needs, in place of peft's forward pass of each module.

    peft    W x, A x, B (A x), times scaling, added           q, k and v each: x is read for every A
    here    W x, [A_q A_k A_v] x, W x + scaling B (A x)       one product for all A, one for B with the sum

Scaling and sum need no kernel of all outputs, forward or backward. Gradients of the A of modules with the
same input are one product as well, and add to the input's gradient once.

Compiled layers keep peft's forward pass: torch.compile fuses scaling and sum itself, and with these objects
each layer would get a graph of its own.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from workers.model.moe.expert_adapters import ADAPTER

SAME_INPUT = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Modules of a block that read the same tensor. If they do not, results are the same and A x is wasted."""


def join_adapter_products(model: nn.Module) -> None:
    """Replace the forward pass of peft's linear layers, in place. Ranks of a tensor-parallel group keep
    peft's: they exchange between A and B.
    """
    from peft.tuners.lora.layer import Linear

    layers = {
        name: layer
        for name, layer in model.named_modules()
        if isinstance(layer, Linear) and not layer.lora_variant
    }
    joined = set()
    for parent, _ in model.named_modules():
        for names in SAME_INPUT:
            paths = [f"{parent}.{name}" if parent else name for name in names]
            members = [layers[path] for path in paths if path in layers]
            if len({layer.in_features for layer in members}) == 1:
                joined |= {path for path in paths if path in layers}
                _join(members)
    for name, layer in layers.items():
        if name not in joined:
            _join([layer])


def _join(layers: list[Any]) -> None:
    products = _InnerProducts(layers)
    for index, layer in enumerate(layers):
        layer.forward = partial(_forward, layer, layer.forward, products, index)


class _InnerProducts:
    """A x of modules with the same input, computed when the first one asks."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self._input: Tensor | None = None
        self._products: dict[int, Tensor] = {}

    def take(self, index: int, x: Tensor) -> Tensor:
        """Return the product of module `index`. After the last one nothing is held."""
        if len(self._layers) == 1:
            return F.linear(x, self._layers[0].lora_A[ADAPTER].weight)
        if self._input is not x or index not in self._products:
            weights = [layer.lora_A[ADAPTER].weight for layer in self._layers]
            sizes = [len(weight) for weight in weights]
            parts = F.linear(x, torch.cat(weights)).split(sizes, dim=-1)
            self._input = x
            self._products = dict(enumerate(parts))
        product = self._products.pop(index)
        if not self._products:
            self._input = None
        return product


def _forward(
    layer: Any,
    peft_forward: Callable[..., Tensor],
    products: _InnerProducts,
    index: int,
    x: Tensor,
) -> Tensor:
    b = layer.lora_B[ADAPTER].weight
    if x.dtype != b.dtype:  # peft casts
        return peft_forward(x)
    result = layer.base_layer(x)
    inner = products.take(index, x)
    scaling = layer.scaling[ADAPTER]
    outputs = torch.addmm(result.flatten(0, -2), inner.flatten(0, -2), b.t(), alpha=scaling)
    return outputs.view(result.shape)
