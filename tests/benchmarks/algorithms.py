"""Do the algorithms learn? Each on the addition example, from the same warm-started model, with the same
data.

    python -m tests.benchmarks.algorithms [--only ppo grpo] [--seeds 0 1 2] [--steps 40] [--folder FOLDER]

Runs what is not in the folder yet (3 to 6 minutes a run on 2 cores), then writes docs/algorithms.md and its
picture from all complete runs in it. Run `make fit` once before: it makes the model.
"""

import argparse
import json
import statistics
import subprocess
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from examples.addition.plot import curve

CONFIG = "examples/addition/config.yaml"
Runs = dict[tuple[str, int], Path]
ALGORITHMS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "dapo": (
        "batch.mini_batches=2",
        "algorithm.zero_variance_groups=replace",
        "algorithm.max_sampling_rounds=4",
        "algorithm.loss.clip_high=0.28",
        "reward.overlong_tokens=8",
    ),
    "rloo": ("algorithm.advantage=rloo", "algorithm.loss.name=reinforce"),
    "reinforce_plus_plus": (
        "algorithm.advantage=reinforce_plus_plus",
        "batch.mini_batches=2",
    ),
    "ppo": (
        "algorithm.advantage=gae",
        "algorithm.gae.lam=0.95",
        "batch.mini_batches=2",
        "critic.optimizer.learning_rate=1e-3",
        "critic.warmup_steps=3",
    ),
    "grpo_replay": ("batch.replay.share=0.25",),
}
DOCUMENT, PICTURE = Path("docs/algorithms.md"), Path("docs/algorithms.png")
HEADER = """# Algorithms

Written by `python -m tests.benchmarks.algorithms`: the addition example of 32 prompts with 8 responses a step, learning
rate 2e-4, each algorithm from the same warm-started model. Exact match of 512 held-out problems, sampled at temperature
1, before and after. Nothing was tuned for an algorithm; the table shows that each learns, not which is best.

![Exact match of training responses over steps](algorithms.png)

| algorithm | seed | steps | before | after | gain | explained variance at the end |
| --- | --- | --- | --- | --- | --- | --- |
"""


def run_folder(folder: Path, algorithm: str, seed: int) -> Path:
    """Where a run of the benchmark stands."""
    return folder / f"{algorithm}-{seed}"


def is_complete(run: Path) -> bool:
    """Whether the run has ended."""
    return (run / "summary.json").exists()


def train(
    folder: Path, name: str, overrides: tuple[str, ...], seed: int, steps: int
) -> None:
    """One run, in a process of its own; goes on from its last checkpoint if it was stopped."""
    own = ["run.resume=auto", "run.checkpoint_every=20", "run.keep_checkpoints=1"]
    own += [
        f"run.dir={folder}",
        f"run.name={name}-{seed}",
        f"run.seed={seed}",
        f"run.steps={steps}",
    ]
    subprocess.run(
        [sys.executable, "-m", "controller.fit", "--config", CONFIG, *own, *overrides],
        check=True,
    )


def compare(
    ways: dict[str, tuple[str, ...]], folder: Path, steps: int, description: str | None
) -> Runs:
    """Run what is missing of the ways, with the command line's options, and return all complete runs."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="*", choices=ways, default=list(ways))
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=steps)
    parser.add_argument("--folder", type=Path, default=folder)
    options = parser.parse_args()
    for seed in options.seeds:
        for name in options.only:
            if not is_complete(run_folder(options.folder, name, seed)):
                train(options.folder, name, ways[name], seed, options.steps)
    pairs = [(name, seed) for name in ways for seed in range(100)]
    return {
        pair: run for pair in pairs if is_complete(run := run_folder(options.folder, *pair))
    }


def row(run: Path, algorithm: str, seed: int) -> str:
    """A line of the table."""
    summary = json.loads((run / "summary.json").read_text())
    before, after = (
        summary["validation"][when]["exact_match"] for when in ("before", "after")
    )
    explained = curve(run, "critic/explained_variance")[1]
    last = f"{statistics.median(explained[-10:]):.2f}" if explained else ""
    cells = (
        algorithm,
        seed,
        summary["steps"],
        f"{before:.3f}",
        f"{after:.3f}",
        f"{after - before:+.3f}",
        last,
    )
    return f"| {' | '.join(map(str, cells))} |"


def draw(runs: Runs, picture: Path) -> None:
    """Exact match of the sampled training responses, a colour a way."""
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    labelled: list[str] = []
    for (name, _), run in runs.items():
        label = None if name in labelled else name
        labelled += [name] if label else []
        steps, values = curve(run, "reward/exact_match")
        smooth = [
            statistics.fmean(values[max(0, i - 4) : i + 1]) for i in range(len(values))
        ]
        axes.plot(steps, smooth, color=f"C{labelled.index(name)}", label=label)
    axes.set(
        xlabel="step",
        ylabel="exact match of training responses\n(mean of 5 steps)",
        ylim=(0, 1),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(picture, dpi=110)


def main() -> None:
    """Run what is missing and write the page."""
    runs = compare(ALGORITHMS, Path("runs/algorithms"), 40, __doc__)
    DOCUMENT.write_text(
        HEADER + "".join(row(run, *pair) + "\n" for pair, run in runs.items())
    )
    draw(runs, PICTURE)
    print(DOCUMENT.read_text())


if __name__ == "__main__":
    main()
