"""Muon against AdamW on the addition example: the same warm-started model, data, learning rate and seeds.

    python -m tests.benchmarks.optimizers [--only adamw] [--seeds 0 1 2] [--steps 20] [--folder FOLDER]

Runs what is not in the folder yet (about 80 seconds a run on 2 idle cores), then writes the end of
docs/optimizers.md from the heading "Measured" on, and its picture. Run `make fit` once before: it makes the
model.
"""

from pathlib import Path

from tests.benchmarks.algorithms import compare, draw, row

MUON = "policy.optimizer.name=muon"
OPTIMIZERS = {
    "adamw": (),
    "muon": (MUON,),
    "muon_8e-4": (MUON, "policy.optimizer.learning_rate=8e-4"),
}
DOCUMENT, PICTURE, HEADING = (
    Path("docs/optimizers.md"),
    Path("docs/optimizers.png"),
    "## Measured",
)
TEXT = f"""{HEADING}

`python -m tests.benchmarks.optimizers`: the addition example with 32 prompts and 8 responses a step, at the
learning rate of its AdamW, 2e-4. In so few steps AdamW's updates are up to five times as large as Muon's, so Muon also
runs at four times the rate. Nothing else was tuned. Exact match of 512 held-out problems, sampled at temperature 1.

![Exact match of training responses over steps](optimizers.png)

| optimiser | seed | steps | before | after | gain |
| --- | --- | --- | --- | --- | --- |
"""


def main() -> None:
    """Run what is missing and write the page."""
    runs = compare(OPTIMIZERS, Path("runs/optimizers"), 20, __doc__)
    table = "".join(
        row(run, *pair).removesuffix("|  |") + "|\n" for pair, run in runs.items()
    )
    DOCUMENT.write_text(DOCUMENT.read_text().partition(HEADING)[0] + TEXT + table)
    draw(runs, PICTURE)
    print(TEXT + table)


if __name__ == "__main__":
    main()
