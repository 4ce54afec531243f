"""Does a reward model that was trained on pairs rank held-out pairs, and improve a policy that has no other
reward?

    python -m tests.benchmarks.reward_model [--steps 30] [--seeds 0] [--folder runs/reward_models]

Trains a reward model on the addition example's pairs (600 steps), and the quickstart's policy on its scores.
Runs what is not in the folder yet, then writes the table of docs/reward-models.md. Run `make fit` once
before: it makes the policy's model and the pairs.
"""

import json
import subprocess
import sys
from pathlib import Path

from examples.addition import reward
from examples.addition.plot import curve
from tests.benchmarks.command import read_options, replace_measured

CONFIG, PAIRS = "examples/addition/config.yaml", "examples/addition/reward_model.yaml"
DOCUMENT = Path("docs/reward-models.md")
SECTION = """
## Measured

Written by `python -m tests.benchmarks.reward_model`: `examples/addition/reward_model.yaml`, then {steps} steps of the
quickstart whose only reward is the model's score, without and with a penalty on the KL to the policy's start
(`algorithm.loss.kl_coefficient`). Exact match of 512 held-out problems, sampled at temperature 1. "Best" is of the
training responses of a step.

Without the penalty the policy soon finds wrong responses that the model has never seen and scores high: exact match
rises for a few steps, then it falls while the score goes on rising. A reward model needs the penalty, or few steps.

| seed | held-out pairs ranked right | penalty | score after | exact match before | best | after | gain |
| --- | --- | --- | --- | --- | --- | --- | --- |
"""
PENALTIES = (0.0, 0.2)


def measured(response: str, solution: str) -> dict[str, float]:
    """Measure exact match without rewarding it."""
    return reward.reward(response, solution) | {"reward": 0.0}


def validation(
    folder: Path, module: str, config: str, *overrides: str
) -> dict[str, dict[str, float]]:
    """Return the scores before and after a run, which is made unless it is there."""
    if not (folder / "summary.json").exists():
        named = (f"run.dir={folder.parent}", f"run.name={folder.name}", "run.resume=auto")
        subprocess.run(
            [sys.executable, "-m", module, "--config", config, *named, *overrides],
            check=True,
        )
    found: dict[str, dict[str, float]] = json.loads((folder / "summary.json").read_text())[
        "validation"
    ]
    return found


def rows(folder: Path, seed: int, steps: int) -> list[str]:
    judge = folder / f"reward_model-{seed}"
    ranked = validation(judge, "controller.reward_model", PAIRS, f"run.seed={seed}")[
        "after"
    ]["accuracy"]
    scored = (
        f"reward.model.path={judge}/model",
        "reward.function=tests.benchmarks.reward_model:measured",
    )
    found = []
    for penalty in PENALTIES:
        run, given = (
            folder / f"policy_kl_{penalty:g}-{seed}",
            f"algorithm.loss.kl_coefficient={penalty:g}",
        )
        policy = validation(
            run,
            "controller.fit",
            CONFIG,
            *scored,
            given,
            f"run.steps={steps}",
            f"run.seed={seed}",
        )
        before, after = (policy[when]["exact_match"] for when in ("before", "after"))
        best = max(curve(run, "reward/exact_match")[1])
        numbers = (policy["after"]["reward"], before, best, after)
        cells = (
            seed,
            f"{ranked:.3f}",
            f"{penalty:g}",
            *(f"{each:.3f}" for each in numbers),
            f"{after - before:+.3f}",
        )
        found.append(f"| {' | '.join(map(str, cells))} |\n")
    return found


def main() -> None:
    options = read_options(__doc__, seeds=[0], steps=30, folder=Path("runs/reward_models"))
    found = [
        line for seed in options.seeds for line in rows(options.folder, seed, options.steps)
    ]
    section = SECTION.format(steps=options.steps) + "".join(found)
    replace_measured(DOCUMENT, section)
    print(section)


if __name__ == "__main__":
    main()
