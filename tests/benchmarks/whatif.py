"""What `ballast.planning.whatif` predicts from synchronous runs of one engine, beside runs with the changes,
on two cores.

    python -m tests.benchmarks.whatif [--steps 30] [--rounds 2] [--output whatif.json]

Engine and trainer have a thread each. The model is random and ends a response one time in 64. Every round
records the synchronous run, predicts all changes from it, and then measures them. The prediction of a change
is written before its run begins.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np

from ballast.planning.whatif import predict
from controller.observability.run_folder import RunFolder
from tests.benchmarks.asynchronous import SETTINGS, make_inputs

CHANGES = (
    ["rollout.max_staleness=1"],
    ["rollout.max_staleness=2"],
    ["rollout.replicas=2"],
    ["rollout.replicas=2", "rollout.max_staleness=1"],
)
ROW = "{:<48}{:>12}{:>12}{:>9}".format


def run(inputs: list[str], folder: Path, name: str, steps: int, *changes: str) -> Path:
    """Make a run and return its folder."""
    command = [sys.executable, "-m", "controller.fit", *inputs, *SETTINGS, *changes, f"run.name={name}"]
    subprocess.run([*command, f"run.steps={steps}"], stdout=subprocess.DEVNULL, check=True)
    return folder / "runs" / name


def speed(folder: Path) -> float:
    """Steps an hour after the first tenth, as `whatif` counts them."""
    seconds = [row["time/step_s"] for row in RunFolder(folder).metrics if row["step"]]
    return 3600 / float(np.mean(seconds[len(seconds) // 10 :]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    found: dict[str, dict[str, list[float]]] = {}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        inputs = make_inputs(folder)
        for number in range(arguments.rounds):
            base = run(inputs, folder, f"base-{number}", arguments.steps, "rollout.replicas=1")
            for place, changes in enumerate(CHANGES):
                row = found.setdefault(" ".join(changes), {"predicted": [], "measured": [], "error": []})
                prediction = predict(base, changes)
                print(
                    f"predicted {' '.join(changes)}: {prediction.steps_per_hour:,.0f} steps an hour",
                    flush=True,
                )
                row["predicted"].append(prediction.steps_per_hour / prediction.recorded)
                measured = speed(run(inputs, folder, f"change-{number}-{place}", arguments.steps, *changes))
                row["measured"].append(measured / prediction.recorded)
                row["error"].append(prediction.simulated / prediction.recorded - 1)
    print(ROW("change", "predicted", "measured", "error"))
    for name, row in found.items():
        expected, measured = (statistics.median(row[key]) for key in ("predicted", "measured"))
        print(ROW(name, f"{expected:.2f}x", f"{measured:.2f}x", f"{expected / measured - 1:+.0%}"))
    if arguments.output:
        arguments.output.write_text(json.dumps(found, indent=2))


if __name__ == "__main__":
    main()
