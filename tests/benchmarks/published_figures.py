"""The time model's prediction of layouts whose speed others have published, and the efficiency that theirs
needs.

    python -m tests.benchmarks.published_figures [--output docs/published-figures.md]

A row's response lengths are log-normal, sigma 0.6, cut at the published limit, with the published mean.
`efficiency` is the factor on every share of the peak (`balancing.time_model.Efficiency`) with which the
prediction is the figure.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from balancing.cost_model import SEVEN_BILLION
from balancing.time_model import (
    Efficiency,
    Layout,
    Machine,
    ModelShape,
    Workload,
    machine_named,
    step_time,
)
from tests.balancing.published_models import DEEPSEEK_V3, QWEN3_30B_A3B
from tests.benchmarks.command import read_options, write_page

NEMO = "https://docs.nvidia.com/nemo/rl/0.6.0/about/performance-summary.html"
VERL = "https://github.com/volcengine/verl/blob/main/docs/advance/fully_async.md"
PRIME = "https://openreview.net/forum?id=yk3ICpEbv8"
CONFIGS: dict[str, dict[str, Any]] = {
    "Qwen3-30B-A3B": QWEN3_30B_A3B,
    "Qwen3-235B-A22B": QWEN3_30B_A3B
    | {
        "num_hidden_layers": 94,
        "hidden_size": 4096,
        "num_attention_heads": 64,
        "moe_intermediate_size": 1536,
    },
    "DeepSeek-V3": DEEPSEEK_V3,
    "Qwen2.5-Math-7B": SEVEN_BILLION,
}
H20 = machine_named("custom", tflops=148.0, bandwidth=4000.0, gib=96.0)


@dataclass(frozen=True)
class Figure:
    """A published step. mean, longest: tokens of a sequence. tokens_per_gpu: a second, or 0 with
    `seconds`.
    """

    model: str
    machine: Machine
    layout: Layout
    samples: int
    each: int
    mean: float
    longest: int
    tokens_per_gpu: float
    updates: int = 1
    prompt: int = 120


def _nemo(
    model: str,
    gpus: int,
    samples: int,
    mean: float,
    longest: int,
    figure: float,
    **fields: Any,
) -> Figure:
    """`updates` of the recipes: samples over T-GBS."""
    updates = fields.pop("updates", 1)
    layout = Layout(
        nodes=gpus // 8, recomputed=1.0, shared_prompts=False, max_tokens=longest, max_concurrent=1024,
        engine_gib=80 * (0.8 if fields.get("placement") == "apart" else 0.6), **fields,
    )  # fmt: skip
    return Figure(
        model, machine_named("H100"), layout, samples, 32, mean, longest, figure, updates
    )


FIGURES = (
    _nemo("Qwen3-30B-A3B", 32, 2048, 3203, 4096, 1102, dp=32, ep=8, engines=16, engine_tp=2, updates=4),
    _nemo(
        "Qwen3-30B-A3B", 32, 2048, 3201, 4096, 1414, dp=8, pp=2, ep=8, engines=8, engine_tp=2, placement=(
            "apart"
        ),
        staleness=1, updates=4,
    ),
    _nemo(
        "Qwen3-30B-A3B", 192, 2048, 3206, 4096, 1025, dp=128, ep=8, engines=32, engine_tp=2, placement=(
            "apart"
        ),
        staleness=8, updates=4,
    ),
    _nemo((
        "Qwen3-235B-A22B"
    ), 128, 512, 5698, 8192, 58.9, dp=4, tp=2, cp=2, pp=8, ep=16, engines=8, engine_tp=16),
    _nemo(
        "Qwen3-235B-A22B", 256, 512, 5721, 8192, 58.7, dp=4, tp=4, pp=8, ep=16, engines=16, engine_tp=8,
        placement="apart", staleness=1,
    ),
    _nemo("DeepSeek-V3", 256, 512, 701, 1536, 12.1, dp=16, pp=16, ep=16, engines=8, engine_tp=32),
)  # fmt: skip
HEADER = """# Predictions of published figures

Written by `python -m tests.benchmarks.published_figures`, which measures nothing.
[NeMo RL 0.6]({nemo})
trains with Megatron and generates with vLLM. Its table names layouts, mean lengths and limits. The time
model of this project predicts these layouts with its stated efficiencies:
{stated}.
Nothing is fitted to these rows. `factor` multiplies all efficiencies so that the prediction equals the figure.
Below 1 the system reached less than the model assumes, or waited for something that the model does not know.

| model, GPUs | tp, cp, ep, pp | engines | S | tokens/s a GPU | predicted | waits for | factor |
| --- | --- | --- | ---: | ---: | ---: | --- | ---: |
"""
FOOTER = """
S is the staleness. A step without it is on policy.

Layouts are those of NeMo RL's
[recipes](https://github.com/NVIDIA-NeMo/RL/tree/r0.6.0/examples/configs/recipes/llm/performance). For
Qwen3-235B-A22B off policy, half of the GPUs are assumed to train. The order of any two rows is right.
All rows are slower than predicted. In the first four, one factor of about 0.6 explains them. DeepSeek-V3 has
512 short samples on 256 GPUs, where waits count that the model does not know.

[verl]({verl_page})
publishes seconds without mean lengths. Its 7B run on 32 H20 takes 790 s: 357 s of generation, 108 s of old
log-probs, 270 s of update. {verl}

[PRIME-RL]({prime}) names 30,000 tokens/s for a 32B model on 24 H200, and
neither lengths nor the split of GPUs, so there is nothing to predict. slime's documentation names no seconds
or tokens/s of whole steps with their layouts.
"""


def workload(figure: Figure) -> Workload:
    """Lengths with the published mean: the median is found by bisection."""
    noise = np.exp(0.6 * np.random.default_rng(0).standard_normal(figure.samples))

    def lengths(median: float) -> np.ndarray:
        return np.minimum(figure.longest, median * noise)

    median = _bisect(
        lambda value: float(lengths(value).mean()), figure.mean, 1.0, 100.0 * figure.longest
    )
    responses = np.maximum(1, lengths(median) - figure.prompt).astype(np.int64)
    prompts = np.full(figure.samples, figure.prompt)
    return Workload(
        prompts, responses, figure.each, updates=figure.updates, forward_passes=1
    )


def _bisect(
    rising: Callable[[float], float], target: float, low: float, high: float
) -> float:
    for _ in range(60):
        middle = (low * high) ** 0.5
        low, high = (middle, high) if rising(middle) < target else (low, middle)
    return low


def scaled(factor: float) -> Efficiency:
    """All shares of the peak, multiplied."""
    kinds = ("matmul", "attention", "prefill", "elementwise", "decode", "link")
    return replace(
        Efficiency(), **{name: factor * getattr(Efficiency(), name) for name in kinds}
    )


def row(figure: Figure) -> str:
    """A line of the table."""
    shape, work, layout = (
        ModelShape.from_model_config(CONFIGS[figure.model]),
        workload(figure),
        figure.layout,
    )
    gpus = layout.gpus
    found = step_time(shape, layout, work, figure.machine)
    speed = [work.tokens / seconds / gpus for seconds in found.step]

    def at(factor: float) -> float:
        return (
            work.tokens
            / step_time(shape, layout, work, figure.machine, scaled(factor)).seconds
            / gpus
        )

    factor = _bisect(at, figure.tokens_per_gpu, 0.01, 100.0)
    needed = f"{factor:.2f}" if factor < 50 else "none"
    cells = [
        f"{figure.model}, {gpus} {figure.machine.name}",
        f"{layout.tp}, {layout.cp}, {layout.ep}, {layout.pp}",
        f"{layout.engines} x {layout.engine_tp}",
        f"{layout.staleness}",
        f"{figure.tokens_per_gpu:,.4g}",
        f"{speed[0]:,.4g} ({speed[2]:,.4g} to {speed[1]:,.4g})",
        found.limit,
        needed,
    ]
    return f"| {' | '.join(cells)} |"


def verl() -> str:
    """What the model says of generation, with lengths for which it agrees about the update."""
    shape = ModelShape.from_model_config(CONFIGS["Qwen2.5-Math-7B"])
    layout = Layout(
        nodes=4,
        dp=32,
        engines=32,
        engine_gib=48,
        recomputed=1.0,
        shared_prompts=False,
        max_tokens=28672,
    )
    figure = Figure("Qwen2.5-Math-7B", H20, layout, 8192, 16, 0.0, 28672, 0.0, updates=16)

    def phases(mean: float) -> dict[str, float]:
        found = step_time(shape, layout, workload(replace(figure, mean=mean)), H20)
        return {name: phase.seconds for name, phase in found.phases.items()}

    mean = _bisect(lambda value: phases(value)["update"], 270.0, 200.0, 20000.0)
    said = phases(mean)
    return (
        f"With a mean of {mean:,.0f} tokens the predicted update takes as long.\nThe model then predicts "
        f"{said['prefill'] + said['decode']:,.0f} s of generation and {said['log_probs']:,.0f} s of "
        "log-probs."
    )


def main() -> None:
    arguments = read_options(__doc__, output=None)
    kinds = ("matmul", "attention", "prefill", "elementwise", "decode", "link")
    stated = ", ".join(f"{name} {getattr(Efficiency(), name):g}" for name in kinds)
    page = HEADER.format(stated=stated, nemo=NEMO) + "\n".join(map(row, FIGURES)) + "\n"
    page += FOOTER.format(prime=PRIME, verl_page=VERL, verl=verl())
    print(page)
    write_page(arguments.output, page)


if __name__ == "__main__":
    main()
