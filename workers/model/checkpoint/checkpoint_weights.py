"""The weights of a sharded model as its files name and shape them, gathered and converted one conversion at a
time.

    shards --adapter merged, cast--> half the bytes --gather--> whole tensors of a conversion --Conversion-->
                       of the stage that holds the weight --> on every rank --> vLLM, files

    in memory                                       on disk
    ...0.mlp.experts.gate_up_proj [E, 2F, H] --+--> ...0.block_sparse_moe.experts.0.w1.weight [F, H]
                                               +--> ...0.block_sparse_moe.experts.0.w3.weight [F, H] ...
    model.norm.weight -------------------------+--> the same

A rank holds the whole weights of one conversion at a time. A layer's experts are the largest. The conversions
are transformers' own. `save_pretrained` would convert a whole state dict at once.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
    revert_weight_conversion,
)

from workers.model.sharding.parallel import full_tensor
from workers.model.stages.stage_pipeline import Stage

Conversion = list[str]
"""Names of a model's tensors that together become a tensor of its files, or several."""


def loading_rules(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversions by which transformers loaded `model`, or its family's usual ones."""
    rules = getattr(model, "_weight_conversions", None)
    if rules is None:
        # As in transformers' `revert_weight_conversion`: only the files show whether names had a prefix.
        rules = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    return rules


def _plan_conversions(
    names: Iterable[str], rules: Sequence[WeightTransform]
) -> dict[str, Conversion]:
    reversed_rules = [rule.reverse_transform() for rule in reversed(rules)]
    renamings = [rule for rule in reversed_rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in reversed_rules if isinstance(rule, WeightConverter)]
    plan: dict[str, Conversion] = defaultdict(list)
    for name in names:
        target, _ = rename_source_key(name, renamings, converters, reverse=True)
        plan[target].append(name)
    return dict(plan)


@dataclass(frozen=True)
class Shard:
    """This rank's part of a weight. like: has the whole weight's shape and type. read: returns the part on
    a device, a DTensor if sharded.
    """

    like: Tensor
    read: Callable[[torch.device], Tensor]

    @classmethod
    def of(cls, weight: Tensor) -> "Shard":
        return cls(weight, weight.detach().to)

    def on(self, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        return self.read(device).to(_type_of(self.like, dtype))


class CheckpointWeights:
    """Provide weights by checkpoint names. Every rank makes the same calls."""

    def __init__(
        self,
        model: PreTrainedModel,
        rules: Sequence[WeightTransform],
        weights: Mapping[str, Tensor],
        shards: Callable[[], Mapping[str, Shard]],
        device: torch.device,
        stage: Stage,
        frozen: frozenset[str] = frozenset(),
    ) -> None:
        """weights: of the whole model, for their shapes, without adapters. shards: of this rank's stage, now.

        frozen: weights that stay as they are in the files, and are not in `updated`.
        """
        self.model = model
        self._current_shards = shards
        self._device = device
        self._stage = stage
        self._empty = {
            name: torch.empty(weight.shape, dtype=weight.dtype, device="meta")
            for name, weight in weights.items()
        }
        self.plan = _plan_conversions(weights, rules)
        self.updated = [
            conversion
            for conversion in self.plan.values()
            if not frozen.issuperset(conversion)
        ]
        # Which only the rank that read the files has.
        model._weight_conversions = list(rules)

    def metadata(
        self, plan: Iterable[Conversion], dtype: torch.dtype | None = None
    ) -> dict[str, Tensor]:
        """Return meta tensors of all that `plan` makes, in order."""
        tensors: dict[str, Tensor] = {}
        for conversion in plan:
            tensors |= revert_weight_conversion(
                self.model, {name: self._like(name, dtype) for name in conversion}
            )
        return tensors

    def convert(
        self,
        plan: Iterable[Conversion],
        dtype: torch.dtype | None = None,
        keeper: int | None = None,
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by name. Collective: every rank runs the iterator to its end.

        dtype: of floats, None keeps theirs. keeper: the only rank that gets weights, or None for all.
        """
        shards = self._current_shards()
        for conversion in plan:
            yield from self._converted(
                conversion, shards, dtype, keeper
            ).items()  # freed before the next

    def _converted(
        self,
        conversion: Conversion,
        shards: Mapping[str, Shard],
        dtype: torch.dtype | None,
        keeper: int | None,
    ) -> dict[str, Tensor]:
        weights = {name: self._gathered(name, shards, dtype) for name in conversion}
        return (
            revert_weight_conversion(self.model, weights)
            if keeper in (None, dist.get_rank())
            else {}
        )

    def has(self, name: str) -> bool:
        return name in self._empty

    def whole(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Return a weight by its name in memory, on every rank. Collective."""
        return self._gathered(name, self._current_shards(), dtype)

    def _gathered(
        self, name: str, shards: Mapping[str, Shard], dtype: torch.dtype | None
    ) -> Tensor:
        holder = self._stage.holder_of(name)
        # Cast before: fewer bytes travel.
        mine = (
            full_tensor(shards[name].on(self._device, dtype))
            if holder == self._stage.index
            else None
        )
        return self._stage.to_all(mine, holder, self._like(name, dtype), self._device)

    def _like(self, name: str, dtype: torch.dtype | None) -> Tensor:
        return self._empty[name].to(_type_of(self._empty[name], dtype))


def _type_of(weight: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and weight.is_floating_point() else weight.dtype
