"""Tiny models in the form of published checkpoints: their config.json with all of its fields, shrunk in size.

published.json --Published--> config.json with few layers of every kind --save_published--> folder
                              (architecture, per-layer lists, factors and switches as they are published)
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoProcessor
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.benchmarks.families.measuring import fill_zeros
from tests.benchmarks.families.shrinking import (
    FACTORS,
    LAYERS,
    POSITIONS,
    SIZES,
    VOCABULARY,
    tiny_config,
)
from tests.benchmarks.families.vision import EDGE, LIKE, processor_for
from tests.workers.model.tiny import save_tokenizer

FILE = Path(__file__).with_name("published.json")
MOST_KINDS = 4
LETTERS = "hybrid_override_pattern"
NESTED = ("text_config", "vision_config", "linear_attn_config")
GATED_HEAD = 64  # vLLM's kernels of gated delta nets on CPUs take 64 and 128 only

TINY: dict[str, Any] = SIZES | {
    **dict.fromkeys(("linear_key_head_dim", "linear_value_head_dim"), GATED_HEAD),
    **dict.fromkeys(("model_max_length", "conv_dim", "block_dim"), POSITIONS),
    **dict.fromkeys(("block_ff_dim", "block_multiple_of"), 64),
    **dict.fromkeys(("mamba_head_dim", "mamba_d_head"), 64),
    **dict.fromkeys(("out_hidden_size", "num_global_key_value_heads"), 128),
    "attention_head_dim": 32,
    "depth": 2,
    "global_head_dim": 32,
    "n_groups": 1,
    "num_local_experts": 4,
    "num_position_embeddings": 64,
    "swa_v_head_dim": 32,
    "top_k_experts": 2,
}
"""Upper bounds by name, beyond those of `shrinking`."""

CHANGES: dict[str, dict[str, Any]] = {
    "falcon_h1": {"mamba_d_ssm": 256, "mamba_n_heads": 4, "mamba_expand": 2},
    "gemma4_text": {"num_global_key_value_heads": 2, "global_head_dim": 64},
    "granitemoehybrid": {"mamba_n_heads": 4},
    "jamba": {
        "attn_layer_offset": 1,
        "attn_layer_period": 2,
        "mamba_dt_rank": 8,
        "num_hidden_layers": 2,
    },
    "kimi_linear": {
        "linear_attn_config": {
            "full_attn_layers": [2],
            "head_dim": 32,
            "kda_layers": [1],
            "num_heads": 4,
            "short_conv_kernel_size": 4,
        },
        "head_dim": 32,
        "num_key_value_heads": 4,
    },
    "nemotron_h": {"mamba_num_heads": 4, "n_groups": 1},
    "olmo_hybrid": {"linear_num_value_heads": 2, "num_key_value_heads": 4},
    "qwen3_5_moe_text": {"full_attention_interval": 2},
    "qwen3_5_text": {"full_attention_interval": 2},
    "qwen3_next": {"full_attention_interval": 2},
    "qwen3_vl": {"deepstack_visual_indexes": [0, 1]},
}
"""Sizes that follow from others, by `model_type`. DeepSeek and its kind have as many key as query heads."""


LATENT = {
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "head_dim": 64,
    "index_head_dim": 128,
}
"""The sizes of a latent that vLLM has kernels for, those of DeepSeek V3, and of its selection of tokens."""


PREFIXES = {"gemma3": {"vision_tower.": "vision_tower.vision_model."}}
"""Names of weights in published files, by the names that transformers saves."""


@dataclass(frozen=True)
class Published:
    """A family's config.json as published. source: where its fields are from."""

    name: str
    source: str
    description: dict[str, Any]

    @property
    def model_type(self) -> str:
        return str(self.description["model_type"])

    @property
    def has_tower(self) -> bool:
        return "vision_config" in self.description

    @property
    def needs_bfloat16(self) -> bool:
        """Whether it has gated delta nets, which vLLM computes on CPUs in bfloat16 only."""
        text = self.description.get("text_config", self.description)
        return "linear_num_value_heads" in text


def published() -> dict[str, Published]:
    """Return the families by their name in docs/models.md."""
    records = json.loads(FILE.read_text(encoding="utf-8"))
    return {
        name: Published(name, record["source"], record["config"])
        for name, record in records.items()
    }


def published_types() -> set[str]:
    """Return every `model_type` with a published form, those of text parts too."""
    descriptions = [family.description for family in published().values()]
    texts = [
        description["text_config"]
        for description in descriptions
        if "text_config" in description
    ]
    return {str(description["model_type"]) for description in (*descriptions, *texts)}


def tiny_description(family: Published) -> dict[str, Any]:
    """Return the family's config.json with the same fields and small sizes."""
    if family.description.keys() == {"model_type"}:
        config = tiny_config(family.model_type)
        architecture = MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[family.model_type]
        return config.to_dict() | {"architectures": [architecture]}
    return _shrunk(family.description)


def _shrunk(description: dict[str, Any]) -> dict[str, Any]:
    kinds = _layer_lists(description)
    letters = "".join(dict.fromkeys(description.get(LETTERS, "")))
    layers = max([2, len(letters), *(len(set(map(str, kind))) for kind in kinds.values())])
    tiny = dict(description)
    for name, value in description.items():
        if name in NESTED and isinstance(value, dict):
            tiny[name] = _shrunk(value)
        elif name in kinds:
            entries = list(dict.fromkeys(value))
            tiny[name] = [entries[index % len(entries)] for index in range(layers)]
        elif name in LAYERS and value:
            tiny[name] = layers
        elif name == "window_size" and "fullatt_block_indexes" in description:
            continue  # in pixels of an image
        elif isinstance(value, int) and not isinstance(value, bool) and name in TINY:
            tiny[name] = min(value, TINY[name])
        elif name in FACTORS and name == "initializer_range":
            tiny[name] = FACTORS[name]
        elif (
            name.endswith(("_token_id", "_index"))
            and isinstance(value, int)
            and value >= VOCABULARY
        ):
            tiny[name] = VOCABULARY - 1 - sorted(description).index(name)
        elif name.endswith("_token_id") and isinstance(value, list):
            tiny[name] = [2]
        elif name == "fullatt_block_indexes":
            tiny[name] = [1]
    if letters:
        tiny[LETTERS] = letters
    if "kv_lora_rank" in tiny:  # one latent for all heads
        tiny["num_key_value_heads"] = tiny["num_attention_heads"]
        tiny |= {name: size for name, size in LATENT.items() if name in tiny}
    for name in ("rope_parameters", "rope_scaling"):
        rope = tiny.get(name) or {}
        if "mrope_section" in rope:
            head_dim = (
                tiny.get("head_dim") or tiny["hidden_size"] // tiny["num_attention_heads"]
            )
            half = int(head_dim * rope.get("partial_rotary_factor", 1.0)) // 2
            tiny[name] = rope | {
                "mrope_section": [half - 2 * (half // 3), half // 3, half // 3]
            }
    return tiny | CHANGES.get(str(tiny.get("model_type")), {})


def _layer_lists(description: dict[str, Any]) -> dict[str, list[Any]]:
    counts = {
        description[name] for name in LAYERS if isinstance(description.get(name), int)
    }
    lists = {name: value for name, value in description.items() if isinstance(value, list)}
    return {
        name: value
        for name, value in lists.items()
        if len(value) in counts and len(set(map(str, value))) <= MOST_KINDS
    }


def stored_dtype(description: dict[str, Any]) -> torch.dtype:
    """Return the type of the published files' weights."""
    text = description.get("text_config", description)
    name = next(
        (
            part[key]
            for part in (description, text)
            for key in ("dtype", "torch_dtype")
            if key in part
        ),
        None,
    )
    return getattr(torch, name or "float32")


def save_published(family: Published, folder: Path) -> None:
    """Write a random model with the published names, fields and architecture, and a tokenizer or processor.

    Raises what transformers raises.
    """
    torch.manual_seed(0)
    description = tiny_description(family)
    folder.mkdir(parents=True, exist_ok=True)
    text = json.dumps(description, indent=1)
    (folder / "config.json").write_text(text, encoding="utf-8")
    config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    processor = None
    if family.has_tower:
        processor = processor_for(
            LIKE.get(family.model_type, family.model_type), config, EDGE
        )
        description |= _token_ids(description, processor)
        text = json.dumps(description, indent=1)
        (folder / "config.json").write_text(text, encoding="utf-8")
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    model = getattr(transformers, description["architectures"][0])(config).float()
    fill_zeros(model)
    model.to(stored_dtype(description)).save_pretrained(folder)
    (folder / "config.json").write_text(text, encoding="utf-8")
    _rename_weights(folder, PREFIXES.get(family.model_type, {}))
    (folder / "generation_config.json").unlink(missing_ok=True)
    if processor is None:
        save_tokenizer(folder, VOCABULARY)
    else:
        processor.save_pretrained(folder)
        AutoProcessor.from_pretrained(folder, local_files_only=True)


def _rename_weights(folder: Path, prefixes: dict[str, str]) -> None:
    """Give weights the names of published files, where transformers saves others."""
    file = folder / "model.safetensors"
    weights = load_file(file)
    for prefix, published_prefix in prefixes.items():
        for name in [name for name in weights if name.startswith(prefix)]:
            weights[published_prefix + name.removeprefix(prefix)] = weights.pop(name)
    save_file(weights, file, metadata={"format": "pt"})


def _token_ids(description: dict[str, Any], processor: Any) -> dict[str, int]:
    """Return the fields that name a processor's tokens, with the ids that its tokenizer gives them."""
    ids = {}
    for field in description:
        name = field.replace("_index", "_id")
        token_id = getattr(processor, name, None) or getattr(
            processor.tokenizer, name, None
        )
        if name.endswith("_token_id") and isinstance(token_id, int):
            ids[field] = token_id
    return ids
