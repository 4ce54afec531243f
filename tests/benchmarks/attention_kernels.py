"""Predict the time and utilisation of long sequences by attention kernel, on one H100 or H200.

    python -m tests.benchmarks.attention_kernels

The time model's seconds of a step, with the rate of torch's varlen kernel and of FlashAttention 4.
"""

import itertools
from dataclasses import replace
from typing import Any

from balancing.time_model.inputs import Layout, ModelShape, Workload
from balancing.time_model.machine import ATTENTION_OF_FLASH4, MACHINES, Efficiency
from balancing.time_model.training import training

TOKENS = 65_536
QWEN3_4B: dict[str, Any] = {
    "model_type": "qwen3",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151_936,
    "tie_word_embeddings": True,
}
KERNELS = {
    "varlen": Efficiency(),
    "flash4": replace(Efficiency(), attention=ATTENTION_OF_FLASH4),
}
ADAPTED = 0.016
"""Share of 4B's weights that LoRA of rank 32 trains."""


RECOMPUTED = {"full": (1.0, 1.0), "selective": (0.8, 0.0), "none": (0.0, 0.0)}
"""Of a forward pass, what the backward pass repeats of a compiled layer: of all but attention, and of it."""


def update_seconds(
    length: int, adapted: bool, recomputed: float, efficiency: Efficiency
) -> float:
    shape = shape_of(adapted)
    workload = Workload(
        [1] * (TOKENS // length), [length - 1] * (TOKENS // length), samples_per_prompt=1
    )
    layout = Layout(
        gpus_per_node=1, max_tokens=length, recomputed=recomputed, shared_prompts=False
    )
    return training(shape, layout, workload, MACHINES["H100"], efficiency).update


def shape_of(adapted: bool) -> ModelShape:
    shape = ModelShape.from_model_config(QWEN3_4B)
    return replace(shape, trained=ADAPTED * shape.parameters) if adapted else shape


def predict(
    length: int, adapted: bool, mode: str, efficiency: Efficiency
) -> tuple[float, float]:
    """Return seconds of an update on TOKENS tokens, and its share of the card's peak.

    As `tests.gpu.benchmark.model_flops`: 6 FLOPs per weight and token, 4 with adapters, and causal attention.
    """
    recomputed, recomputed_attention = RECOMPUTED[mode]
    no_attention = replace(efficiency, attention=1e9)
    seconds = (
        update_seconds(length, adapted, recomputed, no_attention)
        + update_seconds(length, adapted, recomputed_attention, efficiency)
        - update_seconds(length, adapted, recomputed_attention, no_attention)
    )
    shape = shape_of(adapted)
    width = QWEN3_4B["num_attention_heads"] * QWEN3_4B["head_dim"]
    passes = 4 if adapted else 6
    useful = TOKENS * (passes * shape.active + 6 * shape.layers * width * length)
    return seconds, useful / seconds / MACHINES["H100"].flops("bfloat16")


def main() -> None:
    print(
        "| tokens | way | checkpointing | `varlen`, s | `varlen` | `flash4`, s | `flash4` |"
    )
    print("| --- | --- | --- | --- | --- | --- | --- |")
    for length, adapted, mode in itertools.product(
        (16_384, 65_536), (True, False), RECOMPUTED
    ):
        cells = [f"{length:,}", "LoRA 32" if adapted else "whole model", mode]
        for efficiency in KERNELS.values():
            seconds, share = predict(length, adapted, mode, efficiency)
            cells += [f"{seconds:.2f}", f"{share:.1%}"]
        print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
