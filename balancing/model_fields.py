"""Read a Hugging Face model config under the names that its family uses.

config.json or an object --Fields--> a field by its common name --of_layer--> the same for one layer
"""

from collections.abc import Mapping
from typing import Any

from balancing.errors import CostModelError

OTHER_NAMES: dict[str, tuple[str, ...]] = {
    "hidden_size": ("n_embd", "d_model", "emb_dim"),
    "num_hidden_layers": (
        "n_layer",
        "n_layers",
        "decoder_layers",
        "num_decoder_layers",
        "num_layers",
    ),
    "num_attention_heads": (
        "n_head",
        "n_heads",
        "decoder_attention_heads",
        "num_decoder_attention_heads",
        "attention_heads",
        "num_heads",
    ),
    "num_key_value_heads": ("num_kv_heads", "kv_n_heads"),
    "head_dim": (
        "kv_channels",
        "attention_head_dim",
        "d_head",
        "dim_head",
        "attention_head_size",
    ),
    "intermediate_size": (
        "n_inner",
        "ffn_dim",
        "decoder_ffn_dim",
        "ffn_hidden_size",
        "dff",
        "d_inner",
        "dim_ff",
        "feed_forward_size",
        "moe_intermediate_size",
    ),
    "moe_intermediate_size": ("expert_ffn_hidden_size",),
    "num_experts": ("n_routed_experts", "num_local_experts", "moe_num_experts"),
    "num_experts_per_tok": (
        "num_experts_per_token",
        "moe_topk",
        "moe_k",
        "moe_top_k",
        "top_k_experts",
    ),
    "n_shared_experts": ("num_shared_experts", "moe_num_shared_experts"),
    "shared_expert_intermediate_size": ("moe_shared_expert_intermediate_size",),
    "layer_types": ("layers_block_type", "hybrid_override_pattern"),
    "vocab_size": ("n_words", "n_token"),
}
"""Names in config.json by transformers' own, which its classes map by `attribute_map` or keep to
themselves.
"""
SLIDING_FIELDS = ("num_attention_heads", "num_key_value_heads", "head_dim", "v_head_dim")
"""Fields that layers with a sliding window may have of their own, named `swa_...`."""
PARTS = ("attn_config", "ffn_config")
"""Parts of config.json in which DBRX and MPT keep fields of a layer."""
INDEX_LISTS = frozenset(
    {"mlp_only_layers", "moe_layers", "attn_layer_indices", "full_attn_idxs"}
)
"""Lists of layers' numbers. They may have as many entries as there are layers, but not one for each."""


class Fields:
    """Fields of a config, or of its part `nested` where it has one. config: a mapping or an object with
    attributes.
    """

    def __init__(
        self, config: Mapping[str, Any] | object, nested: str = "text_config"
    ) -> None:
        self._config = _as_mapping(config)
        part = self._config.get(nested)
        if part is not None:
            self._config = _as_mapping(part)

    def get(self, *names: str) -> Any:
        """Return the first of the names that has a value, under any of its other names, or None."""
        for name in names:
            for alias in (name, *OTHER_NAMES.get(name, ())):
                value = self._value(alias)
                if value is not None:
                    return value
        return None

    def integer(self, *names: str, default: int | None = None) -> int:
        """Return a whole number, of a list the first. Raises CostModelError for a missing field without a
        default.
        """
        value: Any = self.get(*names)
        if value is None and default is None:
            aliases = OTHER_NAMES.get(names[0], ())
            called = f" (or {', '.join(aliases)})" if aliases else ""
            raise CostModelError(f"the model config has no {' or '.join(names)}{called}.")
        value = default if value is None else value
        return int(value[0] if isinstance(value, (list, tuple)) else value)

    def part(self, name: str) -> dict[Any, Any]:
        """Return a nested part, empty if the config has none."""
        return _as_mapping(self._config.get(name) or {})

    def of_layer(self, layer: int, layers: int, kind: str) -> "Fields":
        """Return the fields of one layer: its own head sizes (Gemma 4), its entries of lists."""
        lists = {
            name: value[layer]
            for name, value in self._config.items()
            if name not in INDEX_LISTS and _is_for_each_layer(value, layers)
        }
        layer_fields = dict(self.part("per_layer_config").get(str(layer)) or {})
        if kind == "sliding_attention":  # MiMo
            names = {name: self._value(f"swa_{name}") for name in SLIDING_FIELDS}
            layer_fields |= {
                name: value for name, value in names.items() if value is not None
            }
        if kind == "full_attention" and self._value("global_head_dim"):
            layer_fields.setdefault("head_dim", self._value("global_head_dim"))
            if self._value("attention_k_eq_v") and self._value(
                "num_global_key_value_heads"
            ):
                layer_fields.setdefault(
                    "num_key_value_heads", self._value("num_global_key_value_heads")
                )
        return Fields(self._config | lists | layer_fields)

    def _value(self, name: str) -> Any:
        values = (config.get(name) for config in (self._config, *map(self.part, PARTS)))
        return next((value for value in values if value is not None), None)


def _as_mapping(config: Mapping[str, Any] | object) -> dict[Any, Any]:
    """Return a dictionary. A configuration of transformers gives what it saves: some fields cannot be asked
    for.
    """
    if isinstance(config, Mapping):
        return {str(name): value for name, value in config.items()}
    if hasattr(config, "to_dict"):
        return _as_mapping(config.to_dict())
    return dict(vars(config))


def _is_for_each_layer(value: Any, layers: int) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == layers and layers > 1
