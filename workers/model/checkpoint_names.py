"""Which tensors of a model make which of its checkpoint: transformers names and fuses some of them otherwise in memory.

    in memory                                             on disk
    ...layers.0.mlp.experts.gate_up_proj [E, 2F, H] --+--> ...layers.0.block_sparse_moe.experts.0.w1.weight [F, H]
                                                      +--> ...layers.0.block_sparse_moe.experts.0.w3.weight [F, H] ...
    model.norm.weight --------------------------------+--> the same

`save_pretrained` converts a whole state dict at once. Here every conversion stands alone, so that weights can be
gathered, converted and sent on a few at a time. The rules and operations are transformers' own.
"""

import copy
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    PrefixChange,
    WeightConverter,
    WeightRenaming,
    WeightTransform,
    rename_source_key,
)


@dataclass(frozen=True)
class Conversion:
    """Tensors `sources` of a model that together make one or several of its checkpoint.

    target: the checkpoint's name, or one that `converter` makes several of. patterns: of each source, what of the
    converter's rules it matched; both are for fused weights, a plain one is only renamed.
    """

    sources: tuple[str, ...]
    target: str
    patterns: tuple[str, ...] = ()
    converter: WeightConverter | None = None

    def apply(self, tensors: Sequence[Tensor], model: PreTrainedModel) -> dict[str, Tensor]:
        """The checkpoint's tensors by name, of those of `sources` in their order; works on the meta device too.

        A converted tensor may be a view of its source.
        """
        if self.converter is None:
            return {self.target: tensors[0]}
        converter = copy.deepcopy(self.converter)  # it keeps what it is given
        for source, pattern, tensor in zip(self.sources, self.patterns, tensors, strict=True):
            converter.add_tensor(self.target, source, pattern, tensor)
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def loading_rules(model: PreTrainedModel) -> list[WeightTransform]:
    """What transformers did when it loaded `model` from its files; of a model made from its configuration alone, what
    it would do with the files that the family usually has."""
    rules = getattr(model, "_weight_conversions", None)
    if rules is None:
        # As in transformers' own `revert_weight_conversion`: whether a prefix was there only the files could say.
        rules = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    return rules


def plan_conversions(names: Iterable[str], rules: Sequence[WeightTransform]) -> list[Conversion]:
    """How the tensors of a model called `names` become those of its checkpoint, in the order of `names`.

    rules: see `loading_rules`. Where several ranks share a model they must use the same.
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
    """What `plan` makes of the model's tensors `sources`, in its order, on the meta device: names, shapes and types."""
    made: dict[str, Tensor] = {}
    for conversion in plan:
        made |= conversion.apply([sources[name].to("meta") for name in conversion.sources], model)
    return made
