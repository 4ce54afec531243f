"""Gradient checkpointing: what a layer keeps of its forward pass for the backward pass, and what it computes
again.

    none        keeps everything. A compiled layer still computes its elementwise operations again
    selective   keeps its input, and the outputs of attention and of matrix products
    full        keeps its input alone

In compiled layers, `selective` keeps attention alone: matrix products are within graphs, which run again as a
whole.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)
from transformers import PreTrainedModel

from workers.config.model import ATTENTION_KEPT
from workers.config.roles import ModelConfig

PRODUCTS = {
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._grouped_mm.default,
}


def checkpoint_layers(
    model: PreTrainedModel,
    layers: Sequence[nn.Module],
    config: ModelConfig,
    tower: Sequence[nn.Module] = (),
    *,
    compiled: bool,
) -> None:
    """Set each layer of this stage to its mode of `config.checkpointing_of`, in place. tower: layers to set
    to full.
    """
    modes = config.checkpointing_of(len(layers))
    if set(modes) == {"none"}:
        return
    model.gradient_checkpointing_enable({"use_reentrant": False})
    for layer in tower:
        layer.training = True
    for layer, mode in zip(layers, modes, strict=True):
        # A layer reads `training` only to decide on checkpointing, and its children stay in eval.
        layer.training = mode != "none"
        if mode in ("selective", ATTENTION_KEPT):
            products = mode == "selective" and not compiled
            policy = partial(_policy, _kept_products(layer) if products else set())
            contexts = partial(create_selective_checkpoint_contexts, policy)
            layer._gradient_checkpointing_func = partial(
                checkpoint, use_reentrant=False, context_fn=contexts
            )


def _kept_products(layer: nn.Module) -> set[Any]:
    # transformers adds the biases of experts in place, to what would be kept.
    in_place = any(getattr(module, "has_bias", False) for module in layer.modules())
    return PRODUCTS - {torch.ops.aten._grouped_mm.default} if in_place else PRODUCTS


def _policy(
    products: set[Any], _: Any, operator: Any, *__: Any, **___: Any
) -> CheckpointPolicy:
    is_kept = (
        operator in products or "attn" in operator.name() or "attention" in operator.name()
    )
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE
