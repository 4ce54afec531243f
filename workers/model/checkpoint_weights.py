"""The weights of a sharded model as its checkpoint has them: names, shapes, and one conversion after the other.

    shards --adapter merged, cast--> half the bytes --gather--> whole tensors of one conversion --Conversion--> vLLM,
                                                    on every rank, or on one                                    files

At no time is more than one conversion's weights (a layer's experts are the largest) whole on a rank.
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
        shards: Callable[[], Mapping[str, Shard]],
        device: torch.device,
    ) -> None:
        """rules: see `loading_rules`, the same on every rank. shards: of the weights as they are now, by the model's
        names without adapters. device: where tensors are gathered."""
        self.model, self._current_shards, self._device = model, shards, device
        weights = {name: shard.weight for name, shard in shards().items()}
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
        for conversion in plan:
            whole = []
            for name in conversion.sources:
                part = shards[name].on(self._device, dtype)  # cast before the gather: fewer bytes travel
                gathered = full_tensor(part) if keeper is None else gather_to(part, keeper)
                whole += [] if gathered is None else [gathered]
            if whole:
                yield from conversion.apply(whole, self.model).items()


def _type_of(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and weight.is_floating_point() else weight.dtype
