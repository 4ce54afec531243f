"""Predict training speed without a GPU: what one micro-batch launches, moves and computes, against a card's
limits.

    python -m tests.benchmarks.roofline [--sizes 1.5B 7B 32B 30B-A3B] [--output docs/gpu-roofline.md]

    seconds = max(bytes read and written / bandwidth, FLOPs / peak of its kind)

The work is counted by `tests.benchmarks.simulated_work`. The last section compares attention kernels.
"""

import argparse
from pathlib import Path

from tests.benchmarks.attention_roofline import kernel_section
from tests.benchmarks.simulated_work import (
    ATTENTION_TFLOPS,
    BANDWIDTH_TBPS,
    CARD,
    LONGEST,
    MATMUL_TFLOPS,
    RANKS,
    TOKENS,
    Description,
    MicroBatch,
    model_flops,
    table,
    work_of,
)
from tests.gpu.benchmark import PEAK_TFLOPS

HEADER = """# Roofline of a training micro-batch

Written by `python -m tests.benchmarks.roofline`, without a GPU: one micro-batch of {tokens:,} tokens in sequences of
{longest:,}, bf16, the PPO loss, {ranks} ranks with FSDP2, forward and backward. The engine runs on the simulated GPU,
and each operator takes the longer of its bytes at {bandwidth} TB/s and its FLOPs at {matmul} TFLOP/s (attention
{attention}). Collectives count as hidden behind the computation. Of a compiled graph, each group of connected operators
between products and attention is one kernel, which reads and writes what enters and leaves the group.

The constants are what an H100 reaches: about 69 % of its data sheet's 989 TFLOP/s in large matrix products, 78 % of
3.35 TB/s. [Measured on a card](gpu-benchmark.md), 1.5B with full checkpointing on an H200, in ms:

| compiled | products and attention | elementwise | kernels |
| --- | --- | --- | --- |
| nothing | 326 | 310 | 5,931 |
| log-probs | 325 | 223 | 5,716 |
| layers too | 340 | 128 | 3,252 |

Log-probs are compiled on GPUs, always, and layers by default. The predictions:
"""
DONE = [
    "model",
    "checkpointing",
    "compiled",
    "kernels",
    "TB",
    "TFLOPs",
    "waits",
    "copies to the card",
    "GB in collectives",
]
TOOK = [
    "model",
    "checkpointing",
    "compiled",
    "products and attention, ms",
    "elementwise, ms",
    "tokens/s",
    "utilisation",
]
TOOK += ["slowest elementwise, ms"]
WAYS = (
    ("full", "nothing"),
    ("full", "log-probs"),
    ("full", "layers too"),
    ("selective", "layers too"),
    ("none", "nothing"),
    ("none", "layers too"),
)
QWEN2 = {
    "model_type": "qwen2",
    "architectures": ["Qwen2ForCausalLM"],
    "max_position_embeddings": 131_072,
}


def qwen2(
    hidden: int,
    wide: int,
    layers: int,
    heads: int,
    kv_heads: int,
    vocabulary: int,
    tied: bool,
) -> Description:
    return QWEN2 | {
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "tie_word_embeddings": tied,
    }


SIZES = {
    "1.5B": qwen2(1536, 8960, 28, 12, 2, 151_936, True),
    "7B": qwen2(3584, 18_944, 28, 28, 4, 152_064, False),
    "32B": qwen2(5120, 27_648, 64, 40, 8, 152_064, False),
    "30B-A3B": {
        "model_type": "qwen3_moe",
        "architectures": ["Qwen3MoeForCausalLM"],
        "max_position_embeddings": 131_072,
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "num_hidden_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
        "norm_topk_prob": True,
        "vocab_size": 151_936,
        "tie_word_embeddings": False,
        "mlp_only_layers": [],
        "decoder_sparse_step": 1,
    },
}


def row(
    name: str, checkpointing: str, compiled: str, experts: int
) -> tuple[list[str], list[str]]:
    """Return cells of DONE and of TOOK."""
    work = work_of(MicroBatch(SIZES[name], checkpointing, compiled, experts))
    times = {operator: work.seconds(operator) for operator in work.kernels}
    computing = sum(seconds for operator, seconds in times.items() if work.flops[operator])
    total = sum(times.values())
    slowest = sorted(
        (operator for operator in times if not work.flops[operator]),
        key=lambda each: -times[each],
    )[:3]
    share = model_flops(SIZES[name], TOKENS, LONGEST) / total / PEAK_TFLOPS[CARD] / 1e12
    names = [f"{name}, ep {experts}" if experts > 1 else name, checkpointing, compiled]
    done = [
        f"{work.kernels.total():,.0f}",
        f"{work.bytes.total() / 1e12:.2f}",
        f"{work.flops.total() / 1e12:,.0f}",
        f"{work.waits:.0f}",
        f"{work.copies:.0f}",
        f"{work.collective_bytes / 1e9:.0f}",
    ]
    took = [
        f"{computing * 1e3:,.0f}",
        f"{(total - computing) * 1e3:,.0f}",
        f"{TOKENS / total:,.0f}",
        f"{share:.0%}",
        ", ".join(f"`{operator}` {times[operator] * 1e3:.0f}" for operator in slowest),
    ]
    return names + done, names + took


def page(sizes: list[str]) -> str:
    ways = [
        (name, *way, experts)
        for name in sizes
        for experts in (1, RANKS)[: 1 + ("A3B" in name)]
        for way in WAYS
    ]
    rows = [row(*way) for way in ways if way[-1] == 1 or way[1:3] == WAYS[2]]
    lines = [
        HEADER.format(
            tokens=TOKENS,
            longest=LONGEST,
            ranks=RANKS,
            bandwidth=BANDWIDTH_TBPS,
            matmul=MATMUL_TFLOPS,
            attention=ATTENTION_TFLOPS,
        ),
        *table(DONE, [done for done, _ in rows]),
        "",
        *table(TOOK, [took for _, took in rows]),
        "",
        f"Utilisation is of the {CARD}'s {PEAK_TFLOPS[CARD]} TFLOP/s, recomputation not counted.",
        "",
        *kernel_section(),
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=SIZES, default=list(SIZES))
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    text = page(arguments.sizes)
    print(text)
    if arguments.output:
        arguments.output.write_text(text)


if __name__ == "__main__":
    main()
