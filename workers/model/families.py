"""What a model's configuration asks for beyond plain causal attention, and what no layout computes.

    config.json --check_supported--> refused by name, or --required_features--> a backend that computes them

Every name of a feature that is refused here would change the log-probs if it were ignored.
"""

from typing import Any

from workers.errors import UnsupportedModelError

FULL, SLIDING = "full_attention", "sliding_attention"
ATTENTION_SOFTCAP, FINAL_SOFTCAP = "attn_logit_softcapping", "final_logit_softcapping"

# The rotary tables of these depend on the longest sequence computed at the same time: results would depend on the plan.
LENGTH_DEPENDENT_ROTARY = ("dynamic", "longrope")


def check_supported(config: Any, layout: str = "packed") -> None:
    """Raise UnsupportedModelError, naming the feature, if a Hugging Face configuration asks for one not computed.

    layout: `packed` or `padded`; padded rows go through transformers' own attention and layers of any kind.
    """
    text = config.get_text_config()
    features = text.to_dict()
    asked = [name for name in sorted(features) if _changes_logits(name, features[name])]
    asked += [f"rope_type={kind}" for kind in _rotary_types(features) if kind in LENGTH_DEPENDENT_ROTARY]
    asked += ["use_bidirectional_attention"] * bool(features.get("use_bidirectional_attention"))
    if layout == "packed":
        asked += sorted(set(features.get("layer_types") or ()) - {FULL, SLIDING})
    if asked:
        raise UnsupportedModelError(
            f"{type(text).__name__} uses {', '.join(asked)}, which the {layout} layout does not compute"
        )


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


def _rotary_types(features: dict[str, Any]) -> list[str]:
    """Of one table for all layers, or of one for each type of layer."""
    parameters = features.get("rope_parameters") or {}
    tables = [parameters, *(table for table in parameters.values() if isinstance(table, dict))]
    return sorted({table["rope_type"] for table in tables if isinstance(table.get("rope_type"), str)})
