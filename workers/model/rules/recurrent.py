"""Layers that carry a state from token to token (state spaces, linear attention, short convolutions), packed.

    layer(hidden, packed_attention=...)      a hook tells the layer's mixers the lengths of the row's segments
      mixer(hidden [1, T, H]) --split--> [1, L, H] each --the mixer, from an empty state--> joined [1, T, H]

The mixer is called once a segment, so that no state reaches the next sequence. The rest of the layer sees the
whole row. The hook runs inside gradient checkpointing.

A mixer is a module that holds a convolution along the sequence, as in all families with a state but MiniMax.

Shapes: T tokens of the row, L of one segment, H hidden size.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from workers.errors import UnsupportedModelError
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
            layer.register_forward_pre_hook(_SegmentHook(mixers), with_kwargs=True)


class _Mixer:
    def __init__(self, mixer: nn.Module) -> None:
        self._forward = mixer.forward
        self.lengths = ()
        mixer.forward = self  # type: ignore[method-assign, assignment]

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        everything: dict[Any, Any] = {**dict(enumerate(arguments)), **named}
        # A mixer inside another mixer is called with one segment.
        if len(self.lengths) < 2 or not any(map(self._is_of_row, everything.values())):
            return self._forward(*arguments, **named)
        parts = {name: self._split(value) for name, value in everything.items()}
        outputs = []
        for index in range(len(self.lengths)):
            segment = {name: part[index] for name, part in parts.items()}
            positional = [segment.pop(place) for place in range(len(arguments))]
            outputs.append(self._forward(*positional, **segment))
        return _joined(outputs)

    def _split(self, value: Any) -> Any:
        return value.split(self.lengths, dim=1) if self._is_of_row(value) else [value] * len(self.lengths)

    def _is_of_row(self, value: Any) -> bool:
        return isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == sum(self.lengths)


class _SegmentHook:
    def __init__(self, mixers: list[_Mixer]) -> None:
        self._mixers = mixers

    def __call__(self, layer: nn.Module, arguments: Any, named: dict[str, Any]) -> None:
        attention = named.get("packed_attention")
        for mixer in self._mixers:
            mixer.lengths = () if attention is None else attention.lengths


def _joined(outputs: list[Any]) -> Any:
    if isinstance(outputs[0], Tensor):
        return torch.cat(outputs, dim=1)
    # The first of further results, such as a cache, is kept.
    return (torch.cat([output[0] for output in outputs], dim=1), *outputs[0][1:])
