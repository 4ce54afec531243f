"""Does a reward model that was trained on pairs rank held-out pairs, and improve a policy that has no other reward?

    python -m tests.benchmarks.reward_model [--steps 30] [--seeds 0] [--folder runs/reward_models]

Trains a reward model on the addition example's pairs (600 steps), and the quickstart's policy on its scores. Runs what
is not in the folder yet, then writes the table of docs/reward-models.md. Run `make fit` once before: it makes the
policy's model and the pairs.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from examples.addition import reward

CONFIG, PAIRS = "examples/addition/config.yaml", "examples/addition/reward_model.yaml"
DOCUMENT = Path("docs/reward-models.md")
START, END = "<!-- measured -->\n", "<!-- end of measured -->"
SECTION = """
## Measured

Written by `python -m tests.benchmarks.reward_model`: `examples/addition/reward_model.yaml`, then {steps} steps of the
quickstart whose only reward is the model's score. Exact match of 512 held-out problems, sampled at temperature 1.

| seed | held-out pairs ranked right | exact match before | after | gain |
| --- | --- | --- | --- | --- |
"""


def measured(response: str, solution: str) -> dict[str, float]:
    """Measure exact match without rewarding it."""
    return reward.reward(response, solution) | {"reward": 0.0}


def validation(folder: Path, module: str, config: str, *overrides: str) -> dict[str, dict[str, float]]:
    """Return the scores before and after a run, which is made unless it is there."""
    if not (folder / "summary.json").exists():
        named = (f"run.dir={folder.parent}", f"run.name={folder.name}", "run.resume=auto")
        subprocess.run([sys.executable, "-m", module, "--config", config, *named, *overrides], check=True)
    found: dict[str, dict[str, float]] = json.loads((folder / "summary.json").read_text())["validation"]
    return found


def row(folder: Path, seed: int, steps: int) -> str:
    judge = folder / f"reward_model-{seed}"
    ranked = validation(judge, "controller.reward_model", PAIRS, f"run.seed={seed}")["after"]["accuracy"]
    scored = f"reward.model.path={judge}/model", "reward.function=tests.benchmarks.reward_model:measured"
    policy = validation(
        folder / f"policy-{seed}", "controller.fit", CONFIG, *scored, f"run.steps={steps}", f"run.seed={seed}"
    )
    before, after = (policy[when]["exact_match"] for when in ("before", "after"))
    return f"| {seed} | {ranked:.3f} | {before:.3f} | {after:.3f} | {after - before:+.3f} |\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0])
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--folder", type=Path, default=Path("runs/reward_models"))
    options = parser.parse_args()
    rows = [row(options.folder, seed, options.steps) for seed in options.seeds]
    before, _, rest = DOCUMENT.read_text().partition(START)
    section = SECTION.format(steps=options.steps) + "".join(rows)
    DOCUMENT.write_text(before + START + section + END + rest.partition(END)[2])
    print(section)


if __name__ == "__main__":
    main()
