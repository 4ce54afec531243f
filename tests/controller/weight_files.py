"""Weight files of any size for tests: a header with names and shapes, and a hole in place of the values."""

import json
import struct
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import Any

Shapes = Mapping[str, tuple[int, ...]]


def write_weight_file(path: Path, shapes: Shapes) -> None:
    """A safetensors file of zeros in bfloat16, which takes no room on the disk."""
    header, end = {}, 0
    for name, shape in shapes.items():
        begin, end = end, end + 2 * prod(shape)
        header[name] = {"dtype": "BF16", "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        file.truncate(8 + len(text) + end)


def qwen2_weights(description: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Names and shapes [outputs, inputs] of a Qwen2 with this config.json, as `save_pretrained`
    writes them.
    """
    hidden, width, heads = (
        description[f"{n}"]
        for n in ("hidden_size", "intermediate_size", "num_attention_heads")
    )
    query, key = (
        hidden // heads * heads,
        hidden // heads * description["num_key_value_heads"],
    )
    layer = {
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (key, hidden),
        "self_attn.v_proj.weight": (key, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "self_attn.q_proj.bias": (query,),
        "self_attn.k_proj.bias": (key,),
        "self_attn.v_proj.bias": (key,),
        "mlp.gate_proj.weight": (width, hidden),
        "mlp.up_proj.weight": (width, hidden),
        "mlp.down_proj.weight": (hidden, width),
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
    }
    weights = {
        "model.embed_tokens.weight": (description["vocab_size"], hidden),
        "model.norm.weight": (hidden,),
    }
    for number in range(description["num_hidden_layers"]):
        weights |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    judges = any(
        "SequenceClassification" in name for name in description.get("architectures", ())
    )
    output = (
        {"score.weight": (1, hidden)}
        if judges
        else {"lm_head.weight": (description["vocab_size"], hidden)}
    )
    return weights | (
        {} if description.get("tie_word_embeddings") and not judges else output
    )
