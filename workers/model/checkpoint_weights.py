"""The weights of a sharded model as its checkpoint has them: names, shapes, and one conversion after the other.

    shards --adapter merged, cast--> half the bytes --gather--> whole tensors of one conversion --Conversion--> vLLM,
                       of the stage that holds the weight --> on every rank, or on one                          files

At no time are more than ROUND_BYTES of weights whole on a rank, or those of one conversion (a layer's experts are the
largest).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightTransform

from workers.model.checkpoint_names import Conversion, converted_metadata, plan_conversions
from workers.model.gathering import gather_to
from workers.model.parallel import full_tensor
from workers.model.pipeline import Stage

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
        for together in self._rounds(plan, dtype):
            names = [name for conversion in together for name in conversion.sources]
            whole = self._gathered(names, shards, dtype, keeper)
            for conversion in together:
                if sources := [whole[name] for name in conversion.sources if name in whole]:
                    yield from conversion.apply(sources, self.model).items()

    def _rounds(self, plan: Sequence[Conversion], dtype: torch.dtype | None) -> Iterator[list[Conversion]]:
        """The conversions, as many at a time as gather up to ROUND_BYTES, and at least one."""
        together: list[Conversion] = []
        total = 0
        for conversion in plan:
            sources = [self._empty[name] for name in conversion.sources]
            size = sum(empty.numel() * _type_of(empty, dtype).itemsize for empty in sources)
            if together and total + size > ROUND_BYTES:
                yield together
                together, total = [], 0
            together, total = [*together, conversion], total + size
        if together:
            yield together

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
        whole = {}
        for name, holder in holders.items():
            empty = self._empty[name]
            like = empty.to(_type_of(empty, dtype))
            tensor = (
                stage.to_all(found.get(name), holder, like, self._device)
                if keeper is None
                else stage.to_keeper(found.get(name), holder, keeper, like, self._device)
            )
            if tensor is not None:
                whole[name] = tensor
        return whole


def _type_of(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and weight.is_floating_point() else weight.dtype
