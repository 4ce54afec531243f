"""Predict the utilisation of long sequences with two attention kernels, by the roofline.

    python -m tests.benchmarks.attention_roofline

prints the section of docs/gpu-roofline.md that `python -m tests.benchmarks.roofline` writes. Attention has the
rates that each kernel was measured with alone (docs/gpu-benchmark.md):

    seconds = FLOPs of forward passes / rate forward + FLOPs of backward passes / rate backward
    1 / rate forward + 2.5 / rate backward = 3.5 / rate of both
"""

from dataclasses import dataclass

from tests.benchmarks.attention_kernels import QWEN3_4B
from tests.benchmarks.simulated_work import (
    CARD,
    MicroBatch,
    Work,
    is_attention,
    model_flops,
    table,
    work_of,
)
from tests.gpu.benchmark import PEAK_TFLOPS

BACKWARD = 2.5
"""FLOPs of attention's backward pass, in forward passes."""


@dataclass(frozen=True)
class Rate:
    """Hold measured TFLOP/s of a kernel, forward, and forward with backward."""

    forward: float
    both: float

    @property
    def backward(self) -> float:
        return BACKWARD / ((1 + BACKWARD) / self.both - 1 / self.forward)


RATES = {
    16_384: {"varlen": Rate(353, 324), "flash4": Rate(621, 625)},
    65_536: {"varlen": Rate(358, 331), "flash4": Rate(669, 648)},
}
"""By the tokens of a sequence, on an H200."""
DESCRIPTION = QWEN3_4B | {
    "architectures": ["Qwen3ForCausalLM"],
    "max_position_embeddings": 131_072,
}
MODES = ("full", "selective")
TITLES = [
    "tokens",
    "checkpointing",
    "products, ms",
    "elementwise, ms",
    "attention `varlen`, ms",
    "`flash4`, ms",
    "utilisation `varlen`",
    "`flash4`",
]


def attention_seconds(work: Work, rate: Rate) -> float:
    """Return the seconds of all attention of a micro-batch at a kernel's rates."""
    seconds = 0.0
    for operator, flops in work.flops.items():
        if is_attention(operator):
            peak = rate.backward if "backward" in operator else rate.forward
            seconds += flops / peak / 1e12
    return seconds


def row(tokens: int, mode: str) -> list[str]:
    work = work_of(
        MicroBatch(DESCRIPTION, mode, "layers too", tokens=tokens, longest=tokens)
    )
    times = {
        operator: work.seconds(operator)
        for operator in work.kernels
        if not is_attention(operator)
    }
    products = sum(seconds for operator, seconds in times.items() if work.flops[operator])
    others = sum(times.values()) - products
    attention = [attention_seconds(work, rate) for rate in RATES[tokens].values()]
    useful = model_flops(DESCRIPTION, tokens, tokens) / PEAK_TFLOPS[CARD] / 1e12
    shares = [useful / (products + others + seconds) for seconds in attention]
    milliseconds = [f"{part * 1e3:,.0f}" for part in (products, others, *attention)]
    return [f"{tokens:,}", mode, *milliseconds, *(f"{share:.1%}" for share in shares)]


def kernel_section() -> list[str]:
    """Return the lines of the section about attention kernels."""
    rows = [row(tokens, mode) for tokens in RATES for mode in MODES]
    return [
        "## Long sequences by attention kernel",
        "",
        "Qwen3-4B, the whole model trained, one sequence a micro-batch, compiled layers. Attention has the",
        "rates that torch's kernel (`varlen`) and flash-attn-4 (`flash4`) [reached alone](gpu-benchmark.md)",
        "on an H200 at this length. **Predicted, not measured.** Printed by",
        "`python -m tests.benchmarks.attention_roofline`:",
        "",
        *table(TITLES, rows),
    ]


if __name__ == "__main__":
    print("\n".join(kernel_section()))
