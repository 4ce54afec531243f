"""Folders that look like Qwen2.5 models of the hub to a configuration: config.json as published, weights left
out.
"""

import json
from pathlib import Path

from tests.controller.tokenizer_file import write_tokenizer
from tests.controller.weight_files import qwen2_weights, write_weight_file

QWEN = {
    "0.5B": (896, 4864, 24, 14, 2, 151_936, True),
    "1.5B": (1536, 8960, 28, 12, 2, 151_936, True),
    "7B": (3584, 18_944, 28, 28, 4, 152_064, False),
    "32B": (5120, 27_648, 64, 40, 8, 152_064, False),
}
"""hidden size, feed-forward width, layers, heads, key-value heads, vocabulary, tied"""

PARAMETERS = {
    "0.5B": 494_032_768,
    "1.5B": 1_543_714_304,
    "7B": 7_615_616_512,
    "32B": 32_763_876_352,
}
"""As the files of the hub state them."""


def qwen_description(size: str) -> dict[str, object]:
    """config.json of Qwen2.5, as far as anything here reads it."""
    hidden, width, layers, heads, key_value_heads, vocabulary, tied = QWEN[size]
    return {
        "model_type": "qwen2",
        "hidden_size": hidden,
        "intermediate_size": width,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": key_value_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 32_768,
        "eos_token_id": 151_645,
        "use_sliding_window": False,
        "sliding_window": 131_072,
    }


def _write_snapshot(cache: Path, name: str, description: dict[str, object]) -> Path:
    """The folder of Qwen/NAME in the cache, with its config.json."""
    model = cache / f"models--Qwen--{name}"
    snapshot = model / "snapshots" / "0"
    snapshot.mkdir(parents=True)
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("0")
    (snapshot / "config.json").write_text(json.dumps(description))
    return snapshot


def write_hub(cache: Path) -> None:
    """A local hub cache with Qwen/Qwen2.5-{size}-Instruct of every size."""
    for size in QWEN:
        snapshot = _write_snapshot(
            cache, f"Qwen2.5-{size}-Instruct", qwen_description(size)
        )
        write_weight_file(
            snapshot / "model.safetensors", qwen2_weights(qwen_description(size))
        )
        write_tokenizer(snapshot)
        (snapshot / "tokenizer_config.json").write_text(
            '{"chat_template": "{{ messages }}"}'
        )
