"""Errors of optimiser states of low precision, against AdamW in float64, and those of torchao's AdamW8bit.

    python -m tests.benchmarks.optimizer_states

Writes the table of docs/small-machines.md. 4 MiB and about 20 seconds: torchao compiles a step. Without torchao
its row is left out.
"""

from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from workers.config.roles import OptimizerConfig
from workers.model.optimizer.optimizer import make_optimizer

DOCUMENT = Path("docs/small-machines.md")
HEADING = "| AdamW's state | even | four decades | 1,000 steps | shrinking |\n| --- | --- | --- | --- | --- |\n"
SHAPE = (64, 256)
STEPS = 50
RATE = 1e-3
BETA2 = 0.999
NEAREST = "bfloat16, rounded to nearest"
TORCHAO = "torchao AdamW8bit"
STATES = (
    "float32",
    "bfloat16",
    "int8",
    NEAREST,
    *((TORCHAO,) if find_spec("torchao") else ()),
)


def even(generator: torch.Generator, steps: int = STEPS) -> Iterator[Tensor]:
    """Yield gradients of one size."""
    for _ in range(steps):
        yield torch.randn(SHAPE, generator=generator) + 0.5


def four_decades(generator: torch.Generator) -> Iterator[Tensor]:
    """Yield gradients whose sizes differ within a row."""
    sizes = 10 ** (4 * torch.rand(SHAPE, generator=generator) - 4)
    for gradient in even(generator):
        yield gradient * sizes


def even_for_long(generator: torch.Generator) -> Iterator[Tensor]:
    return even(generator, 20 * STEPS)


def shrinking(generator: torch.Generator) -> Iterator[Tensor]:
    """Yield gradients that shrink tenfold after 50 of 1,000 steps. The second moment has to follow."""
    for step, gradient in enumerate(even_for_long(generator)):
        yield gradient * (1 if step < STEPS else 0.1)


GRADIENTS = (even, four_decades, even_for_long, shrinking)


class NearestAdamW(torch.optim.AdamW):
    """AdamW whose moments are rounded to the nearest bfloat16 after each step."""

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        super().step()
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                state[name].copy_(state[name].bfloat16().float())


def make(state: str, weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    options = {"lr": RATE, "betas": (0.9, BETA2), "eps": 1e-8, "weight_decay": 0.0}
    if state == TORCHAO:
        from torchao.optim import AdamW8bit

        return AdamW8bit([weight], **options)
    if state == NEAREST:
        return NearestAdamW([weight], **options)
    config = OptimizerConfig(learning_rate=RATE, beta2=BETA2, state_dtype=state)
    return make_optimizer([("weight", weight)], config)


def update(
    state: str, gradients: Callable[[torch.Generator], Iterator[Tensor]], dtype: torch.dtype
) -> Tensor:
    """Return the sum of all updates, float64."""
    generator = torch.Generator().manual_seed(0)
    begin = torch.randn(SHAPE, generator=generator) / 20
    weight = torch.nn.Parameter(begin.to(dtype, copy=True))
    optimizer = make(state, weight)
    for gradient in gradients(generator):
        weight.grad = gradient.to(dtype)
        optimizer.step()
    return weight.detach().double() - begin.double()


def _name(row: str) -> str:
    return row[: row.index("|", 1)]


def main() -> None:
    """Measure and write the table."""
    rows = []
    for state in STATES:
        errors = []
        for gradients in GRADIENTS:
            exact = update("float32", gradients, torch.float64)
            error = update(state, gradients, torch.float32) - exact
            errors.append(f"{(error.norm() / exact.norm()).item():.2g}")
        rows.append(f"| {state} | {' | '.join(errors)} |\n")
    before, heading, after = DOCUMENT.read_text().partition(HEADING)
    rest = [
        line
        for line in after.splitlines(keepends=True)
        if not line.startswith(tuple(map(_name, rows)))
    ]
    DOCUMENT.write_text(before + heading + "".join(rows + rest))
    print("".join(rows))


if __name__ == "__main__":
    main()
