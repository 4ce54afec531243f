"""The weights of a sharded model as its checkpoint has them: names, shapes, and one conversion after the other.

    shards --adapter merged, cast--> half the bytes --gather--> whole tensors of one conversion --Conversion--> vLLM,
                       of the stage that holds the weight --> on every rank, or on one                          files

At no time are more than ROUND_BYTES of weights whole on a rank, or those of one conversion (a layer's experts are the
largest).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from workers.model.checkpoint_names import Conversion, converted_metadata, plan_conversions
from workers.model.gathering import gather_to
from workers.model.parallel import full_tensor
from workers.model.pipeline import Stage

Item = TypeVar("Item")

ROUND_BYTES = 2**25
"""Small weights are gathered together, up to this many bytes: each collective takes a millisecond on a CPU."""


@dataclass(frozen=True)
class Shard:
    """This rank's part of a weight: a DTensor where several ranks share it. merge: adds an adapter to the part."""

    weight: Tensor
    merge: Callable[[Tensor], Tensor] | None = None

    def on(self, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        """The part with its adapter; collective where there is one."""
        part = self.weight.detach().to(device)
        part = self.merge(part) if self.merge else part
        return part.to(_type_of(self.weight, dtype))


class CheckpointWeights:
    """Weights by the names of the checkpoint. Every rank makes the same calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        rules: Sequence[WeightTransform],
        weights: Mapping[str, Tensor],
        shards: Callable[[], Mapping[str, Shard]],
        device: torch.device,
        stage: Stage,
    ) -> None:
        """rules: see `loading_rules`, the same on every rank. weights: of the whole model, for their shapes, by its
        names without adapters. shards: those of this rank's stage as they are now. device: where tensors are gathered.
        """
        self.model, self._current_shards, self._device, self._stage = model, shards, device, stage
        self._empty = {
            name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for name, weight in weights.items()
        }
        self.plan = plan_conversions(weights, rules)

    def metadata(self, plan: Sequence[Conversion], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Tensors on the meta device of all that `plan` makes, in its order; nothing is gathered."""
        needed = [name for conversion in plan for name in conversion.sources]
        empty = {name: self._empty[name].to(_type_of(self._empty[name], dtype)) for name in needed}
        return converted_metadata(plan, empty, self.model)

    def convert(
        self, plan: Sequence[Conversion], dtype: torch.dtype | None = None, keeper: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Whole weights by name, one conversion of `plan` after the other. dtype: of floats; None leaves it.

        keeper: the only rank that gets them, the others get none; None is every rank. Collective either way: every
        rank runs the iterator to its end.
        """
        shards = self._current_shards()
        for together in _rounds(plan, lambda conversion: sum(self._size(name, dtype) for name in conversion.sources)):
            yield from self._converted(together, shards, dtype, keeper)  # its weights go before others are gathered

    def _size(self, name: str, dtype: torch.dtype | None) -> int:
        """Bytes of a weight."""
        empty = self._empty[name]
        return empty.numel() * _type_of(empty, dtype).itemsize

    def _converted(
        self, plan: Sequence[Conversion], shards: Mapping[str, Shard], dtype: torch.dtype | None, keeper: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """What a round of conversions makes. shards: those of this rank's stage."""
        whole: dict[str, Tensor] = {}
        names = [name for conversion in plan for name in conversion.sources]
        for together in _rounds(names, lambda name: self._size(name, dtype)):  # several of a conversion that is larger
            whole |= self._gathered(together, shards, dtype, keeper)
        for conversion in plan:
            if sources := [whole[name] for name in conversion.sources if name in whole]:
                yield from conversion.apply(sources, self.model).items()

    def _gathered(
        self, names: Sequence[str], shards: Mapping[str, Shard], dtype: torch.dtype | None, keeper: int | None
    ) -> dict[str, Tensor]:
        """Weights whole, on the keeper or everywhere. shards: those of this rank's stage."""
        stage = self._stage
        holders = {name: stage.holder_of(name) for name in names}
        mine = [name for name, holder in holders.items() if holder == stage.index]
        if missing := [name for name in mine if name not in shards]:
            raise RuntimeError(f"stage {stage.index} does not hold {missing}")
        parts = {name: shards[name].on(self._device, dtype) for name in mine}  # cast before: fewer bytes travel
        if keeper is None:
            found = {name: full_tensor(part) for name, part in parts.items()}
        else:
            found = gather_to(parts, stage.counterpart(keeper))
        whole: dict[str, Tensor | None] = {}
        for name, holder in holders.items():
            like = self._empty[name].to(_type_of(self._empty[name], dtype))
            if keeper is None:
                whole[name] = stage.to_all(found.get(name), holder, like, self._device)
            else:
                whole[name] = stage.to_keeper(found.get(name), holder, keeper, like, self._device)
        return {name: tensor for name, tensor in whole.items() if tensor is not None}


def _rounds(items: Iterable[Item], size: Callable[[Item], int]) -> Iterator[list[Item]]:
    """The items in their order, as many at a time as have ROUND_BYTES together, and at least one."""
    together: list[Item] = []
    total = 0
    for item in items:
        if together and total + size(item) > ROUND_BYTES:
            yield together
            together, total = [], 0
        together.append(item)
        total += size(item)
    if together:
        yield together


def _type_of(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and weight.is_floating_point() else weight.dtype
