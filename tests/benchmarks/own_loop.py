"""What a loop of one's own costs over the configured run: seconds of a step on 2 CPU cores.

    python -m tests.benchmarks.own_loop [--steps 12] [--rounds 3]

The same GRPO steps by `ballast.fit` and by the loop of docs/primitives.md, in turn, each with a Ray of its
own. Medians over the steps after the first three, and over rounds.
"""

import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path

import ballast
from ballast.loop.open_run import OpenRun
from controller.algorithm.advantages import sequence_advantages
from controller.observability.run_folder import RunFolder
from tests.benchmarks.command import read_options
from tests.benchmarks.step_time import Setting, make_inputs

WARM_UP = 3
SIZES = ("1M", "5M")


def configured(settings: list[str]) -> Path:
    return ballast.fit(overrides=settings).folder


def own(settings: list[str]) -> Path:
    with ballast.open(overrides=settings) as run:
        grpo(run, prompts=8, samples=8)
        return run.folder


def grpo(run: OpenRun, *, prompts: int, samples: int) -> None:
    for _ in range(run.config.run.steps):
        batch = run.sample(run.prompts(prompts), n=samples).result().batch
        advantages = sequence_advantages(run.config.algorithm, batch, batch["reward"])
        run.forward_backward(batch, columns={"advantages": advantages})
        run.step()
        run.publish().result()


def seconds(loop: Callable[[list[str]], Path], settings: list[str]) -> float:
    """From the end of a step to the end of the next, by metrics.jsonl's clock."""
    rows = [row for row in RunFolder(loop(settings)).metrics if row["step"] > WARM_UP]
    return statistics.median(row["time/step_s"] for row in rows)


def main() -> None:
    arguments = read_options(__doc__, steps=12, rounds=3)
    print("| model | configured, s | own loop, s | ratio |\n| --- | ---: | ---: | ---: |")
    with tempfile.TemporaryDirectory() as temporary:
        for size in SIZES:
            options = make_inputs(Path(temporary), Setting(size))
            settings = [
                *options,
                f"run.dir={temporary}/runs",
                f"run.steps={arguments.steps}",
            ]
            found: dict[Callable[..., Path], list[float]] = {configured: [], own: []}
            for number in range(arguments.rounds):
                for loop in found:
                    name = f"run.name={size}-{loop.__name__}-{number}"
                    found[loop].append(seconds(loop, [*settings, name]))
            usual, mine = (statistics.median(each) for each in found.values())
            print(f"| {size} | {usual:.3f} | {mine:.3f} | {mine / usual:.3f} |", flush=True)


if __name__ == "__main__":
    main()
