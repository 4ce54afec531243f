"""The weights of a sharded model as its files name and shape them, gathered and converted in small rounds.

    shards --adapter merged, cast--> half the bytes --gather--> whole tensors of one conversion --Conversion--> vLLM,
                       of the stage that holds the weight --> on every rank, or on one                          files

    in memory                                             on disk
    ...layers.0.mlp.experts.gate_up_proj [E, 2F, H] --+--> ...layers.0.block_sparse_moe.experts.0.w1.weight [F, H]
                                                      +--> ...layers.0.block_sparse_moe.experts.0.w3.weight [F, H] ...
    model.norm.weight --------------------------------+--> the same

A rank holds at most ROUND_BYTES of whole weights at a time, or one conversion (a layer's experts are the largest).
The conversions are transformers' own; `save_pretrained` would convert a whole state dict at once.
"""

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)

from workers.model.sharding.parallel import full_tensor
from workers.model.stages.stage_pipeline import Stage


@dataclass(frozen=True)
class Conversion:
    """Convert tensors `sources` of a model to one or several tensors of its checkpoint.

    target: the name in the checkpoint; `converter` may produce several. patterns: the converter's pattern that each
    source matched. Fused weights have patterns and a converter; other weights are only renamed.
    """

    sources: tuple[str, ...]
    target: str
    patterns: tuple[str, ...] = ()
    converter: WeightConverter | None = None

    def apply(self, tensors: Sequence[Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """Return the checkpoint's tensors by name, from the tensors of `sources` in order; works on the meta device.

        A converted tensor may be a view of its source.
        """
        if self.converter is None:
            return {self.target: tensors[0]}
        converter = copy.deepcopy(self.converter)  # a converter collects the tensors added to it
        for source, pattern, tensor in zip(self.sources, self.patterns, tensors, strict=True):
            converter.add_tensor(self.target, source, pattern, tensor)
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def loading_rules(model: PreTrainedModel) -> list[WeightTransform]:
    """Return the conversions that transformers applied when it loaded `model`.

    For a model built from its configuration, return the conversions for the family's usual files.
    """
    rules = getattr(model, "_weight_conversions", None)
    if rules is None:
        # As in transformers' `revert_weight_conversion`: only the files show whether there was a prefix.
        rules = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    return rules


def plan_conversions(names: Iterable[str], rules: Sequence[WeightTransform]) -> list[Conversion]:
    """Return the conversions of a model's tensors `names` to its checkpoint's, in the order of `names`.

    rules: see `loading_rules`; the same on all ranks that share a model.
    """
    reversed_rules = [rule.reverse_transform() for rule in reversed(rules)]
    renamings = [rule for rule in reversed_rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in reversed_rules if isinstance(rule, WeightConverter)]
    by_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, list[tuple[str, str | None]]] = {}
    for name in names:
        target, pattern = rename_source_key(name, renamings, converters, reverse=True)
        found.setdefault(target, []).append((name, pattern))
    plan = []
    for target, matched in found.items():
        sources, patterns = zip(*matched, strict=True)
        if patterns[0] is None:
            plan.append(Conversion(sources, target))
        else:
            plan.append(Conversion(sources, target, patterns, by_pattern[patterns[0]]))
    return plan


def converted_metadata(
    plan: Sequence[Conversion], sources: Mapping[str, Tensor], model: PreTrainedModel
) -> dict[str, Tensor]:
    """Return the checkpoint tensors that `plan` makes of `sources`, by name in order, on the meta device."""
    made: dict[str, Tensor] = {}
    for conversion in plan:
        made |= conversion.apply([sources[name].to("meta") for name in conversion.sources], model)
    return made


def gather_to(tensors: Mapping[str, Tensor], keeper: int) -> dict[str, Tensor]:
    """Gather each of `tensors` whole on the global rank `keeper`, and nothing on others; collective over all ranks.

    Dimensions of the mesh are undone from left to right: FSDP's before tensor parallelism's. Tensors with the same
    layout travel together, since collectives are slow for small tensors. A plain tensor is whole on every rank and is
    not sent.
    """
    alike: dict[Any, dict[str, DTensor]] = defaultdict(dict)
    whole: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if isinstance(tensor, DTensor):
            replicated = tuple(placement.is_replicate() for placement in tensor.placements)
            alike[tensor.device_mesh, replicated, tensor.dtype][name] = tensor
        elif dist.get_rank() == keeper:
            whole[name] = tensor
    for (mesh, _, _), shards in alike.items():
        gathered = _gathered(list(shards.values()), mesh, keeper)
        whole |= zip(shards, gathered, strict=True) if gathered else {}
    return whole


def _gathered(tensors: list[DTensor], mesh: DeviceMesh, keeper: int) -> list[Tensor] | None:
    here, there = mesh.get_coordinate(), _coordinate(mesh, keeper)
    if here is None or there is None:  # the keeper is in another group with the same tensors
        return None
    parts = [tensor.to_local() for tensor in tensors]
    for dimension, placement in enumerate(tensors[0].placements):
        if placement.is_replicate():
            if here[dimension] != there[dimension]:
                return None
            continue
        undone = _undo(parts, tensors, dimension, here, there[dimension])
        if undone is None:
            return None
        parts = undone
    return parts


def _undo(
    parts: list[Tensor], tensors: list[DTensor], dimension: int, here: list[int], keeper: int
) -> list[Tensor] | None:
    """Undo the sharding of `parts` over a mesh dimension, on that dimension's rank `keeper`.

    Shards are sized as by `torch.chunk`; the last ones are padded here for the gather.
    """
    mesh = tensors[0].device_mesh
    ranks = mesh.size(dimension)
    rows = [_rows(tensor, dimension, here) for tensor in tensors]
    padded = []
    for part, tensor, count in zip(parts, tensors, rows, strict=True):
        mine = part.movedim(_sharded_dimension(tensor.placements[dimension]), 0)
        padded.append(mine.new_zeros(-(-count // ranks), *mine.shape[1:]))
        padded[-1][: len(mine)] = mine
    sent = torch.cat([shard.flatten() for shard in padded])
    received = sent.new_empty(ranks, len(sent)) if here[dimension] == keeper else None
    pieces = None if received is None else list(received)
    dist.gather(sent, pieces, group=mesh.get_group(dimension), group_dst=keeper)
    if received is None:
        return None
    whole, columns = [], received.split([shard.numel() for shard in padded], dim=1)
    for shards, shard, tensor, count in zip(columns, padded, tensors, rows, strict=True):
        sharded = _sharded_dimension(tensor.placements[dimension])
        whole.append(shards.reshape(-1, *shard.shape[1:])[:count].movedim(0, sharded).contiguous())
    return whole


def _rows(tensor: DTensor, dimension: int, here: list[int]) -> int:
    """Return the rows of the local part that a mesh dimension shares."""
    mesh, sharded = tensor.device_mesh, _sharded_dimension(tensor.placements[dimension])
    rows = tensor.shape[sharded]
    for later in range(dimension + 1, mesh.ndim):
        placement = tensor.placements[later]
        if not placement.is_replicate() and _sharded_dimension(placement) == sharded:
            rows = _chunk(rows, mesh.size(later), here[later])
    return rows


def _chunk(rows: int, ranks: int, rank: int) -> int:
    largest = -(-rows // ranks)
    return max(0, min(rows - rank * largest, largest))


def _sharded_dimension(placement: Placement) -> int:
    dimension: int = placement.dim  # type: ignore[attr-defined]  # of Shard, and of FSDP2's strided one
    return dimension


def _coordinate(mesh: DeviceMesh, rank: int) -> list[int] | None:
    places = torch.nonzero(mesh.mesh == rank)
    return places[0].tolist() if len(places) else None


Item = TypeVar("Item")

ROUND_BYTES = 2**25
"""Small weights are gathered together, up to this many bytes: each collective takes a millisecond on a CPU."""


@dataclass(frozen=True)
class Shard:
    """Hold this rank's part of a weight: a DTensor if sharded. merge: adds an adapter to the part."""

    weight: Tensor
    merge: Callable[[Tensor], Tensor] | None = None

    def on(self, device: torch.device, dtype: torch.dtype | None) -> Tensor:
        """Return the part with its adapter; collective if it has one."""
        part = self.weight.detach().to(device)
        part = self.merge(part) if self.merge else part
        return part.to(_type_of(self.weight, dtype))


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
    ) -> None:
        """rules: see `loading_rules`, the same on every rank. weights: of the whole model, for their shapes, by names
        without adapters. shards: returns the current shards of this rank's stage. device: where tensors are gathered.
        """
        self.model, self._current_shards, self._device, self._stage = model, shards, device, stage
        self._empty = {
            name: torch.empty(weight.shape, dtype=weight.dtype, device="meta") for name, weight in weights.items()
        }
        self.plan = plan_conversions(weights, rules)

    def metadata(self, plan: Sequence[Conversion], dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Return meta tensors of all that `plan` makes, in order; nothing is gathered."""
        needed = [name for conversion in plan for name in conversion.sources]
        empty = {name: self._empty[name].to(_type_of(self._empty[name], dtype)) for name in needed}
        return converted_metadata(plan, empty, self.model)

    def convert(
        self, plan: Sequence[Conversion], dtype: torch.dtype | None = None, keeper: int | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield whole weights by name, one conversion of `plan` after the other. dtype: of floats; None keeps theirs.

        keeper: the only rank that gets weights; None is every rank. Collective: every rank runs the iterator to its
        end.
        """
        shards = self._current_shards()
        for together in _rounds(plan, lambda conversion: sum(self._size(name, dtype) for name in conversion.sources)):
            yield from self._converted(together, shards, dtype, keeper)  # frees these weights before the next round

    def _size(self, name: str, dtype: torch.dtype | None) -> int:
        empty = self._empty[name]
        return empty.numel() * _type_of(empty, dtype).itemsize

    def _converted(
        self, plan: Sequence[Conversion], shards: Mapping[str, Shard], dtype: torch.dtype | None, keeper: int | None
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the results of a round of conversions. shards: of this rank's stage."""
        whole: dict[str, Tensor] = {}
        names = [name for conversion in plan for name in conversion.sources]
        for together in _rounds(names, lambda name: self._size(name, dtype)):  # several rounds for a larger conversion
            whole |= self._gathered(together, shards, dtype, keeper)
        for conversion in plan:
            if sources := [whole[name] for name in conversion.sources if name in whole]:
                yield from conversion.apply(sources, self.model).items()

    def _gathered(
        self, names: Sequence[str], shards: Mapping[str, Shard], dtype: torch.dtype | None, keeper: int | None
    ) -> dict[str, Tensor]:
        """Return whole weights, on the keeper or everywhere. shards: of this rank's stage."""
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
    """Yield the items in order, as many at a time as fit ROUND_BYTES, and at least one."""
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
