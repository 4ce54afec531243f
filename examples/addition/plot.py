"""Reward curves of runs as one picture.

python -m examples.addition.plot runs/addition runs/addition-2 --output docs/addition.png
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot


def curve(run: Path, key: str) -> tuple[list[int], list[float]]:
    """(steps, values) of one metric in the run's metrics.jsonl."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    points = [(line["step"], line[key]) for line in lines if key in line]
    return [step for step, _ in points], [value for _, value in points]


def main() -> None:
    """Draw exact match of sampled training responses and of held-out problems, a colour a run."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, default=Path("addition.png"))
    options = parser.parse_args()
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for number, run in enumerate(options.runs):
        seed = next(
            line.split(":")[1].strip()
            for line in (run / "config.yaml").read_text().splitlines()
            if " seed:" in line
        )
        colour = f"C{number}"
        axes.plot(*curve(run, "reward/exact_match"), color=colour, linewidth=1, alpha=0.6)
        axes.plot(
            *curve(run, "validation/exact_match"), "o", color=colour, label=f"seed {seed}"
        )
    axes.set(xlabel="step", ylabel="exact match, sampled at temperature 1", ylim=(0, 1))
    axes.legend(
        title="dots: 512 held-out problems\nlines: training problems",
        frameon=False,
        loc="lower right",
    )
    axes.grid(alpha=0.3)
    figure.savefig(options.output, dpi=130)
    print(options.output)


if __name__ == "__main__":
    main()
