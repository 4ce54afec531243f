"""A part of the proof: a run of controller.fit, its mismatch by step, its phases beside the prediction.

python -m tests.gpu.prove.whole_run quickstart
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from omegaconf import OmegaConf

from tests.gpu.prove.outcome import SECONDS, end_tree, write_facts
from tests.gpu.prove.prediction import describe_prediction
from tests.gpu.prove.versions import lines_of
from tests.gpu.prove.workloads import WORKLOADS, Workload

LOOK_S = 0.5
CARD_S = 2.0  # between two looks at the card's memory
END_S = 45.0  # for a run that is told to end: its step, and its processes
WARM_STEPS = 2
SMALL_BATCH = ("batch.prompts_per_step=16", "rollout.samples_per_prompt=4")
EVERYWHERE = (
    "batch.mini_batches=2",
    "policy.data_parallel=1",
    "rollout.replicas=1",
    "policy.max_mismatch=100",
)
EVERYWHERE += ("resources.dashboard=false", "run.name=run")
ON_CPUS = ("rollout.threads=1", "rollout.cpu_kv_cache_gib=0.25")
PHASES = ("rollout", "plan", "log_probs", "update", "weights", "step")
MISMATCH = "policy/rollout_mismatch_mean"


def settings_of(workload: Workload, folder: Path, device: str) -> list[str]:
    """Return a whole configuration. Later settings replace earlier ones. On CPUs a run is small."""
    settings = [*SMALL_BATCH, *workload.settings, *EVERYWHERE]
    settings += [
        f"run.dir={folder}",
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
    ]
    settings += [f"resources.device={device}", f"run.steps={workload.steps}"]
    if workload.predicted:
        settings.append(f"reward.function={folder / 'reward.py'}:reward")
    if device == "cuda":
        return settings
    settings = [
        line
        for line in settings
        if not line.startswith(("rollout.gpu_", "rollout.placement"))
    ]
    settings += [
        *ON_CPUS,
        "batch.prompts_per_step=4",
        "rollout.samples_per_prompt=2",
        "run.steps=3",
    ]
    return [*settings, "rollout.sampling.max_new_tokens=16"]


class Watch:
    """What is seen of a run from outside: when its first step began, and the card's memory."""

    def __init__(self, run_folder: Path) -> None:
        self.run_folder = run_folder
        self.began = time.monotonic()
        self.start_s = 0.0
        self.card_used_s = 0.0
        self.peak_mib = 0
        self._looked = 0.0

    def look(self) -> None:
        seconds = time.monotonic() - self.began
        if not self.start_s and (steps := steps_of(self.run_folder)):
            self.start_s = round(seconds - sum(step["time/step_s"] for step in steps), 1)
        if seconds - self._looked < CARD_S:
            return
        self._looked = seconds
        query = [
            "nvidia-smi",
            "--query-gpu=memory.used,utilization.gpu",
            "--format=csv,noheader,nounits",
        ]
        for line in lines_of(query):
            used, busy = (
                int(word) if word.strip().isdigit() else 0 for word in line.split(",")
            )
            self.peak_mib = max(self.peak_mib, used)
            if busy and not self.card_used_s:
                self.card_used_s = round(seconds, 1)


def steps_of(run_folder: Path) -> list[dict[str, Any]]:
    """Return the metrics of all steps that have ended."""
    path = run_folder / "metrics.jsonl"
    lines = path.read_text().splitlines() if path.exists() else []
    return [row for row in map(json.loads, lines) if row["step"] and "time/step_s" in row]


def run(config: Path, watch: Watch, seconds: float) -> int | None:
    """Run controller.fit for at most `seconds`. Returns its exit code, None if it had to be ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "controller.fit", "--config", str(config)]
    )
    try:
        while process.poll() is None and time.monotonic() - watch.began < seconds - END_S:
            time.sleep(LOOK_S)
            watch.look()
        code = process.poll()
        if code is None:
            process.send_signal(signal.SIGTERM)  # ends after its step
            process.wait(END_S)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        end_tree(process.pid)
        process.wait()
    return code


def problem_of(
    workload: Workload, code: int | None, steps: Sequence[dict[str, Any]], planned: int
) -> str:
    """Return why a run is no proof, or an empty text."""
    if code:
        return ""  # the run's own error is its last line
    versions = [step["rollout/weight_version"] for step in steps]
    mismatches = [step[MISMATCH] for step in steps]
    if not steps:
        return "no step ended in time"
    if max(mismatches) > workload.most_mismatch:
        return f"mismatch {max(mismatches):.4f} nats, above {workload.most_mismatch:g}"
    if versions != [float(number) for number in range(1, len(steps) + 1)]:
        return f"weight versions {versions}"
    if len(steps) < planned:
        return f"{len(steps)} of {planned} steps ended in time"
    return ""


def seconds_of_phases(steps: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Return medians over the steps after the first two, which compile and allocate."""
    warm = steps[WARM_STEPS:] or steps[-1:]
    names = [name for name in PHASES if all(f"time/{name}_s" in step for step in warm)]
    return {
        name: round(median(step[f"time/{name}_s"] for step in warm), 3) for name in names
    }


def main(name: str) -> int:
    workload = WORKLOADS[name]
    device = os.environ["BALLAST_PROOF_DEVICE"]
    deadline = time.monotonic() + float(os.environ[SECONDS])
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as temporary:
        folder = Path(temporary)
        workload.make(folder, device)
        settings = OmegaConf.from_dotlist(settings_of(workload, folder, device))
        OmegaConf.save(settings, folder / "config.yaml")
        watch = Watch(folder / "run")
        code = run(folder / "config.yaml", watch, deadline - time.monotonic())
        steps = steps_of(folder / "run")
        write_facts(
            mismatch=[step[MISMATCH] for step in steps],
            rewards=[step["reward/mean"] for step in steps],
            phases=seconds_of_phases(steps) if steps else {},
            first_step_s=round(steps[0]["time/step_s"], 1) if steps else None,
            start_s=watch.start_s,
            card_idle_s=watch.card_used_s,
            peak_gib=round(watch.peak_mib / 1024, 1),
        )
        if workload.predicted and steps:
            write_facts(**describe_prediction(folder / "run", device))
    if problem := problem_of(workload, code, steps, int(settings.run.steps)):
        print(problem)
        return 1
    return 1 if code else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
