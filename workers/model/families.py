"""What a model's configuration asks for beyond plain causal attention, and what no layout computes.

    config.json --uncomputed_features--> refused by name, on the driver from the file and on a worker as loaded
                --required_features----> a backend that computes them

Every name of a feature that is refused here would change the log-probs if it were ignored. Nothing heavy is imported:
the driver looks here before it starts anything.
"""

from collections.abc import Mapping
from typing import Any

from workers.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION_SOFTCAP, FINAL_SOFTCAP = "attn_logit_softcapping", "final_logit_softcapping"

# The rotary tables of these depend on the longest sequence computed at the same time: results would depend on the plan.
LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")

TENSOR_PARALLEL_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Model types whose layers are built of the modules that `tensor_parallel` shares, and of nothing else that has
parameters."""

KERNEL_FEATURES = {
    "packed": {
        "flash3": frozenset({"sliding_window", "sinks"}),
        "varlen": frozenset({"sliding_window", "sinks"}),
        "flash": frozenset({"sliding_window", "softcap"}),
        "sdpa": frozenset({"sliding_window", "softcap", "sinks"}),
    },
    "padded": {"sdpa": frozenset({"sliding_window"}), "eager": frozenset({"sliding_window", "softcap", "sinks"})},
}
"""What the kernels of each layout compute beyond causal attention, in the names of `required_features`."""


def check_supported(config: Any, layout: str = "packed") -> None:
    """Raise UnsupportedModelError, naming the feature, if a Hugging Face configuration asks for one not computed.

    layout: `packed` or `padded`; padded rows go through transformers' own attention and layers of any kind.
    """
    text = config.get_text_config()
    asked = uncomputed_features(text.to_dict(), layout)
    if asked:
        raise UnsupportedModelError(
            f"{type(text).__name__} uses {', '.join(asked)}, which the {layout} layout does not compute"
        )


def uncomputed_features(features: Mapping[str, Any], layout: str = "packed") -> list[str]:
    """Names of what a language model's configuration asks for and `layout` does not compute.

    features: the keys of config.json, of its `text_config` where it has one, or of a loaded configuration as a mapping.
    A file may leave to its model class what a loaded configuration spells out, so that the latter may name more.
    """
    asked = [name for name in sorted(features) if _changes_logits(name, features[name])]
    asked += [f"rope_type={kind}" for kind in _rotary_types(features) if kind in LENGTH_DEPENDENT_ROTARY]
    asked += ["use_bidirectional_attention"] * bool(features.get("use_bidirectional_attention"))
    if layout == "packed":
        asked += sorted(set(features.get("layer_types") or ()) - {FULL, SLIDING})
    return asked


def features_of_file(features: Mapping[str, Any]) -> frozenset[str]:
    """Of `sliding_window` and `softcap`, what a config.json asks for in so many words; a model class may add more."""
    layer_types = features.get("layer_types")
    says_window = features.get("use_sliding_window", features.get("model_type") == "mistral")
    windowed = SLIDING in layer_types if layer_types else bool(says_window and features.get("sliding_window"))
    needed = {"sliding_window": windowed, "softcap": bool(features.get(ATTENTION_SOFTCAP))}
    return frozenset(name for name, need in needed.items() if need)


def required_features(config: Any, parameter_names: list[str]) -> frozenset[str]:
    """Of `sliding_window`, `softcap` and `sinks`, those that the attention layers of a model need."""
    text = config.get_text_config()
    layers = range(text.num_hidden_layers)
    needed = {
        "sliding_window": any(expected_window(text, index) is not None for index in layers),
        "softcap": bool(getattr(text, ATTENTION_SOFTCAP, None)),
        "sinks": any(name.endswith("sinks") for name in parameter_names),
    }
    return frozenset(name for name, need in needed.items() if need)


def expected_window(config: Any, layer_index: int) -> int | None:
    """Tokens that each token sees in a layer, itself included; None is all before it."""
    layer_types = getattr(config, "layer_types", None)
    window = getattr(config, "sliding_window", None)
    if layer_types:
        return window if layer_types[layer_index] == SLIDING else None
    return window if getattr(config, "use_sliding_window", True) else None


def final_softcap(config: Any) -> float | None:
    """The c of an output layer whose logits are c tanh(x / c), or None."""
    return getattr(config.get_text_config(), FINAL_SOFTCAP, None) or None


def _changes_logits(name: str, value: Any) -> bool:
    """A factor on logits, or a cap that is none of the two known, in the names that model families give them."""
    if "softcap" in name or "soft_cap" in name:
        return bool(value) and name not in (ATTENTION_SOFTCAP, FINAL_SOFTCAP)
    return name in ("logit_scale", "logits_scaling") and value not in (None, 1, 1.0)


def _rotary_types(features: Mapping[str, Any]) -> list[str]:
    """Of one table for all layers, or of one for each type of layer; older files say rope_scaling and type."""
    parameters = features.get("rope_parameters") or features.get("rope_scaling") or {}
    tables = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    kinds = (table.get("rope_type", table.get("type")) for table in tables)
    return sorted({kind for kind in kinds if isinstance(kind, str)})
