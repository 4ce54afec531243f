"""A decoder's list of layers of which this rank holds some, under their own names. The others pass their
input on.

    layers     0     1     2     3     4     5         a part with layers 2 and 3
               |     |   [own] [own]   |     |
               |  received --> 2 --> 3 --> sent |       other layers pass their input on

The family's own loop over the layers is unchanged, with its masks, rotary tables and embedding factors.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from workers.errors import UnsupportedModelError


@dataclass(frozen=True)
class Part:
    """Hold consecutive layers. first: they follow the embedding. last: the output layer follows them."""

    layers: range
    first: bool
    last: bool


@dataclass
class Passing:
    """Hold one pass of a micro-batch through a part.

    received: hidden states [R, W, H] of the part before, None for the first. sent: for the part after, once
    computed.
    """

    part: Part
    received: Tensor | None = None
    sent: Tensor | None = None

    def through_other(self, index: int, hidden: Tensor) -> Tensor:
        if index == self.part.layers.stop and not self.part.last:
            self.sent = hidden
        if index == self.part.layers.start - 1 and self.received is not None:
            return self.received
        return hidden

    def result(self) -> Tensor:
        if self.sent is None:
            raise UnsupportedModelError(
                "the model does not run its list of layers in order, so it cannot be split into stages. "
                "Set policy.parallel.pipeline_parallel=1."
            )
        return self.sent


class StageLayers(nn.ModuleList):
    def __init__(self, layers: nn.ModuleList, indices: set[int]) -> None:
        super().__init__()
        self.passing: Passing | None = None
        self._whole = list(layers)
        for index in sorted(indices):
            self.add_module(str(index), layers[index])

    def __len__(self) -> int:
        return len(self._whole)

    def __iter__(self) -> Iterator[Any]:
        return iter([self._called(index) for index in range(len(self))])

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def _called(self, index: int) -> Callable[..., Any]:
        if self.passing is None:
            raise RuntimeError(
                "the layers of a stage are run by a pass through a part of them"
            )
        layer = self._whole[index]
        return (
            layer
            if index in self.passing.part.layers
            else _Other(layer, index, self.passing)
        )


@dataclass(frozen=True)
class _Other:
    layer: nn.Module
    index: int
    passing: Passing

    def __call__(self, hidden_states: Tensor, *_: Any, **__: Any) -> Tensor:
        return self.passing.through_other(self.index, hidden_states)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.layer, name)


@contextmanager
def carried(layers: nn.Module | None, passing: Passing | None) -> Iterator[None]:
    if not isinstance(layers, StageLayers):
        yield
        return
    layers.passing = passing
    try:
        yield
    finally:
        layers.passing = None
