"""The weights of a sharded model as its checkpoint has them: names, shapes, and one conversion after the other.

    shards --adapter merged, cast--> half the bytes --gather--> whole tensors of one conversion --Conversion--> vLLM,
                       of the stage that holds the weight --> on every rank, or on one                          files

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
from workers.model.pipeline import Stage


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
        for conversion in plan:
            whole = []
            for name in conversion.sources:
                gathered = self._gathered(name, shards.get(name), dtype, keeper)
                whole += [] if gathered is None else [gathered]
            if whole:
                yield from conversion.apply(whole, self.model).items()

    def _gathered(self, name: str, shard: Shard | None, dtype: torch.dtype | None, keeper: int | None) -> Tensor | None:
        """A weight whole, on the keeper or everywhere; shard: this rank's, where its stage has the weight."""
        stage, found = self._stage, None
        holder = stage.holder_of(name)
        if stage.index == holder:
            if shard is None:
                raise RuntimeError(f"stage {holder} does not hold {name}")
            part = shard.on(self._device, dtype)  # cast before the gather: fewer bytes travel
            found = full_tensor(part) if keeper is None else gather_to(part, stage.counterpart(keeper))
        empty = self._empty[name]
        like = empty.to(_type_of(empty, dtype))
        if keeper is None:
            return stage.to_all(found, holder, like, self._device)
        return stage.to_keeper(found, holder, keeper, like, self._device)


def _type_of(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and weight.is_floating_point() else weight.dtype
