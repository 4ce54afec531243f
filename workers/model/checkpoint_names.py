"""Maps tensors of a model to those of its checkpoint: transformers renames and fuses some of them in memory.

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

    target: the name in the checkpoint; `converter` may make several of it. patterns: the pattern of the converter that
    each source matched. Fused weights have patterns and a converter; other weights are only renamed.
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
        converter = copy.deepcopy(self.converter)  # a converter collects the tensors added to it
        for source, pattern, tensor in zip(self.sources, self.patterns, tensors, strict=True):
            converter.add_tensor(self.target, source, pattern, tensor)
        made = converter.convert(self.target, model=model, config=model.config)
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}


def loading_rules(model: PreTrainedModel) -> list[WeightTransform]:
    """The conversions that transformers applied when it loaded `model` from its files.

    For a model made from its configuration alone, those that it applies to the family's usual files.
    """
    rules = getattr(model, "_weight_conversions", None)
    if rules is None:
        # As in transformers' `revert_weight_conversion`: only the files show whether there was a prefix.
        rules = get_model_conversion_mapping(model, add_legacy=False)
        rules = [rule for rule in rules if not isinstance(rule, PrefixChange)]
    return rules


def plan_conversions(names: Iterable[str], rules: Sequence[WeightTransform]) -> list[Conversion]:
    """The conversions of a model's tensors `names` into those of its checkpoint, in the order of `names`.

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
    """The checkpoint tensors that `plan` makes of `sources`, by name in its order, on the meta device."""
    made: dict[str, Tensor] = {}
    for conversion in plan:
        made |= conversion.apply([sources[name].to("meta") for name in conversion.sources], model)
    return made
