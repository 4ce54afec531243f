"""Layers that carry a state from token to token (state spaces, linear attention, short convolutions), packed.

    layer(hidden, packed_attention=...)      a hook tells the layer's mixers the segments of the row
      mixer(hidden [1, T, H])  --its functions follow the segments, see `states`---------> [1, T, H]
                               --others are called with batches [n, L, H] of like segments-> [1, T, H]

So no state reaches the next sequence. The state of a shared prefix reaches all that continue it, in mixers
whose functions follow the segments. The rest of the layer sees the whole row. The hook runs inside gradient
checkpointing. `torch.compile` leaves mixers out: a graph of their loops took minutes.

A mixer is a module that holds a convolution along the sequence, as in all families with a state but MiniMax.

Shapes: T tokens of the row, n segments of a batch, at most L tokens each, H hidden size.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from workers.errors import UnsupportedModelError
from workers.model.attention.state_rows import StateRow
from workers.model.attention.states import (
    RowHook,
    follow_rows,
    follows_rows,
    in_batches,
    is_of_row,
    over_row,
)
from workers.model.rules.families import RECURRENT


def find_mixers(layer: nn.Module) -> list[nn.Module]:
    return [module for module in layer.modules() if _has_convolution(module)]


def _has_convolution(module: nn.Module) -> bool:
    return any(isinstance(child, nn.Conv1d) for child in module.children())


def check_mixers(layers: Sequence[nn.Module], config: Any) -> None:
    """Raise UnsupportedModelError if a layer of a model (`config`) carries a state without a mixer."""
    kinds = getattr(config.get_text_config(), "layer_types", None) or []
    for index, layer in enumerate(layers):
        mixers = find_mixers(layer)
        kind = kinds[index] if index < len(kinds) else ""
        if layer in mixers or (kind in RECURRENT and not mixers):
            raise UnsupportedModelError(
                f"layer {index}, {type(layer).__name__}, carries a state from token to token by no separate "
                "module, so that sequences of a packed row cannot be told apart. Set model.layout=padded."
            )


def split_by_segment(layers: Iterable[nn.Module]) -> None:
    """Make the mixers of `layers` reset their state at every segment of a packed row."""
    for layer in layers:
        mixers = [_Mixer(mixer) for mixer in find_mixers(layer)]
        if mixers:
            layer.register_forward_pre_hook(RowHook(mixers), with_kwargs=True)


class _Mixer:
    def __init__(self, mixer: nn.Module) -> None:
        self._forward = mixer.forward
        self._follows_rows = follows_rows(mixer)
        self.row: StateRow | None = None
        if self._follows_rows:
            follow_rows(mixer)
        mixer.forward = torch.compiler.disable(self)  # type: ignore[method-assign, assignment]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        row = self.row
        if row is None:
            return self._forward(*arguments, **named)
        if self._follows_rows:
            with over_row(row):
                return self._forward(*arguments, **named)
        # A mixer inside another mixer is called with a batch.
        sees_row = any(is_of_row(row, value) for value in (*arguments, *named.values()))
        if len(row.lengths) < 2 or not sees_row:
            return self._forward(*arguments, **named)
        return in_batches(row, self._forward, *arguments, **named)
