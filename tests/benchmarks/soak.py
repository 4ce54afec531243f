"""A long run of a tiny model in which processes are killed: `python -m tests.benchmarks.soak`.

steps, seed --> run --at some moments--> SIGKILL of an engine, a rollout actor, a reward worker or a policy rank
                 |--in the last steps--> nothing: memory is seen of processes that live long
                 |--every step--> memory of every process, named actors
                 '--end--> each step once, slopes, what is left behind --> a table, exit code 1 if anything is wrong

An engine on a CPU is a thread of its actor. With --engine-processes it is a process, as on GPUs, and killed,
too.
"""

import argparse
import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections import Counter, defaultdict
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import ray

from controller.observability.run_folder import RunFolder
from examples.addition import data
from examples.addition.warm_start import create_model
from tests.end_to_end.faults import Fault, RunWithFaults, run_with

SETTINGS = (
    "batch.prompts_per_step=3",
    "rollout.samples_per_prompt=3",
    "rollout.sampling.max_new_tokens=8",
    "rollout.cpu_kv_cache_gib=0.004",  # all of it has been touched after some steps
    "rollout.replicas=2",
    "rollout.threads=1",
    "policy.max_tokens_per_micro_batch=128",
    "reward.function=examples.addition.reward:reward",
    "data.max_prompt_tokens=26",
    "run.name=soak",
    "run.checkpoint_every=5",
    "run.max_restarts=1000",
    "tracking.tensorboard=false",
)
SAMPLES, PROMPTS = 9, 3  # of a step
SHARED_FILE = re.compile(r"/dev/shm/\S+")
MIB = 2**20
LEAST_STEPS = 80  # of a process's life, of which the first half goes to filling caches
MOMENTS_S = 1.0  # after the beginning of a step, within which a process is killed: about as long as one lasts
# oneDNN, with which vLLM multiplies on a CPU, keeps what it compiled for the last 1,024 shapes. Until these
# have come an engine grows, for hundreds of steps; with 64 of them a leak would show.
SHAPES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "64"}
PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "1"}
FLAT_MIB_A_STEP = 0.5


@dataclass
class Watch:
    """What is seen of a run step by step: (step, MiB) of every process by role and id, its files in /dev/shm,
    kills.
    """

    rng: random.Random
    memory: dict[tuple[str, int], list[tuple[int, float]]] = field(
        default_factory=lambda: defaultdict(list)
    )
    killed: Counter[str] = field(default_factory=Counter)
    shared_files: set[str] = field(default_factory=set)
    most_actors: int = 0

    def look(self, run: Any) -> None:
        step = run.number
        self.most_actors = max(self.most_actors, len(ray.util.list_named_actors()))
        for process in [psutil.Process(), *psutil.Process().children(recursive=True)]:
            try:
                role = (
                    "driver"
                    if process.pid == os.getpid()
                    else role_of(" ".join(process.cmdline()))
                )
                if role:
                    # Without shared pages: those of the object store are its own, touched once here or there.
                    memory = process.memory_info()
                    self.memory[role, process.pid].append(
                        (step, (memory.rss - memory.shared) / MIB)
                    )
                self.shared_files |= set(
                    SHARED_FILE.findall(Path(f"/proc/{process.pid}/maps").read_text())
                )
            except (psutil.Error, OSError):
                continue

    def look_and_kill(self, run: Any) -> None:
        """Kill a process in a moment, whatever the run then does."""
        self.look(run)
        threading.Timer(self.rng.uniform(0.0, MOMENTS_S), self.kill).start()

    def kill(self) -> None:
        """One of the processes of the run, drawn by role, as soon as there is one."""
        found = defaultdict(list)
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.Error):
                role = role_of(" ".join(process.cmdline()))
                if role in ("engine", "rollout", "reward", "policy"):
                    found[role].append(process.pid)
        if not found:  # the run is about to go on from its last checkpoint
            threading.Timer(MOMENTS_S, self.kill).start()
            return
        # A policy rank costs a start of everything, so it is drawn less often.
        role = self.rng.choices(
            sorted(found), [1 if name == "policy" else 2 for name in sorted(found)]
        )[0]
        self.killed[role] += 1
        os.kill(self.rng.choice(found[role]), signal.SIGKILL)

    def slopes(self) -> dict[str, tuple[int, float, float]]:
        """By role: processes that lived long enough, their largest MiB and their steepest slope in MiB a
        step.
        """
        found: dict[str, tuple[int, float, float]] = {}
        for (role, _), seen in sorted(self.memory.items()):
            if len(seen) < LEAST_STEPS:
                continue
            steps, resident = np.array(seen[len(seen) // 2 :]).T
            count, largest, steepest = found.get(role, (0, 0.0, -np.inf))
            slope = float(np.polyfit(steps, resident, 1)[0])
            found[role] = (
                count + 1,
                max(largest, float(max(resident))),
                max(steepest, slope),
            )
        return found


def role_of(command: str) -> str:
    """Of a process, by its title; "" for those of no interest."""
    titles = {
        "VLLM::EngineCore": "engine",
        "VllmEngineActor": "rollout",
        "PolicyWorker": "policy",
    }
    titles |= {"RewardWorker": "reward", "raylet/raylet": "raylet", "gcs_server": "gcs"}
    return next((role for title, role in titles.items() if title in command), "")


def main() -> int:
    """Run, print the table, return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument(
        "--kills", type=int, default=12, help="processes to kill, one in a step"
    )
    parser.add_argument(
        "--until", type=int, help="the last step in which one is killed; half of --steps"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--engine-processes", action="store_true", help="engines in processes of their own"
    )
    parser.add_argument(
        "--max-staleness",
        type=int,
        default=0,
        help="steps for which groups are generated ahead",
    )
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    arguments.until = arguments.until or arguments.steps // 2
    os.environ.update(SHAPES | (PROCESSES if arguments.engine_processes else {}))
    watch, begun = Watch(random.Random(arguments.seed)), time.monotonic()
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=512 * MIB,
    )
    with tempfile.TemporaryDirectory() as folder:
        run = soak(Path(folder), arguments, watch)
        lines, last = RunFolder(run.config.run_folder).metrics, run.last
        lengths = (run.config.run_folder / "lengths.jsonl").read_text().splitlines()
        trained = [json.loads(line)["prompts"] for line in lengths]
    left = {"named actors": ray.util.list_named_actors()}
    ray.shutdown()
    _, alive = psutil.wait_procs(psutil.Process().children(recursive=True), timeout=20)
    left |= {"processes": [process.name() for process in alive]}
    left |= {
        "files in /dev/shm that hold 1 MiB or more": sorted(
            filter(holds_memory, watch.shared_files)
        )
    }
    lost, wrong = unaccounted(lines, trained, arguments.steps), problems(watch, left)
    page = report(arguments, watch, last, left, lost, wrong, time.monotonic() - begun)
    print(page)
    if arguments.output:
        arguments.output.write_text(page)
    return 1 if lost + wrong else 0


def holds_memory(path: str) -> bool:
    """Whether a file is left with something in it. vLLM's queues between processes, 400 MiB by name, are all
    but empty, and stay where an engine was killed: Ray ends the process that would remove them.
    """
    return Path(path).exists() and Path(path).stat().st_blocks * 512 >= MIB


def soak(folder: Path, arguments: argparse.Namespace, watch: Watch) -> RunWithFaults:
    """The run, at its end."""
    steps, ahead = arguments.steps, arguments.max_staleness
    create_model(folder / "model", seed=0)
    data.write(folder / "train.jsonl", 64, seed=1, held_out=False)
    overrides = [
        *SETTINGS,
        f"run.steps={steps}",
        f"run.dir={folder}",
        f"model.path={folder / 'model'}",
    ]
    overrides += [f"rollout.max_staleness={ahead}"] if ahead else []
    # A step that is repeated is not disturbed again: what follows it is another step's.
    faults: dict[int, Fault] = dict.fromkeys(range(1, steps + 1), watch.look)
    faults |= dict.fromkeys(
        watch.rng.sample(range(2, arguments.until + 1), arguments.kills),
        watch.look_and_kill,
    )
    return run_with([*overrides, f"data.train={folder / 'train.jsonl'}"], faults)


def unaccounted(
    lines: list[dict[str, Any]], trained: list[list[int]], steps: int
) -> list[str]:
    """Steps that metrics.jsonl does not have once and with all of their samples, and prompts that
    lengths.jsonl does not have once with all of theirs, a sentence each.
    """
    wrong = []
    counts = Counter(place for places in trained for place in places)
    if counts != dict.fromkeys(range(steps * PROMPTS), SAMPLES // PROMPTS):
        wrong.append(
            "lengths.jsonl does not have every prompt in one step with all of its samples."
        )
    if [line["step"] for line in lines] != list(range(steps + 1)):
        wrong.append("metrics.jsonl does not have every step once.")
    lines = [line for line in lines[1:] if line["rollout/samples"] != SAMPLES]
    return wrong + [
        f"step {line['step']} has {line['rollout/samples']:.0f} samples." for line in lines
    ]


def problems(watch: Watch, left: dict[str, list[str]]) -> list[str]:
    """What else is not as it should be."""
    wrong = [f"{len(found)} {what} are left." for what, found in left.items() if found]
    slopes = watch.slopes()
    wrong += [
        f"{role} grows by {s:.2f} MiB a step."
        for role, (_, _, s) in slopes.items()
        if s > FLAT_MIB_A_STEP
    ]
    return wrong


def report(
    arguments: argparse.Namespace,
    watch: Watch,
    last: dict[str, float],
    left: dict[str, list[str]],
    lost: list[str],
    wrong: list[str],
    seconds: float,
) -> str:
    """The page, in Markdown."""
    apart = arguments.engine_processes
    option, kind = (
        (" --engine-processes", " in processes of their own") if apart else ("", "")
    )
    if ahead := arguments.max_staleness:
        option += f" --max-staleness {ahead}"
    killed = ", ".join(f"{count} x {role}" for role, count in sorted(watch.killed.items()))
    rows = [
        f"| {role} | {count} | {largest:,.0f} | {slope:+.3f} |"
        for role, (count, largest, slope) in sorted(watch.slopes().items())
    ]
    remains = ", ".join(f"{what}: {len(found)}" for what, found in left.items())
    return "\n".join(
        [
            "# Soak with generation ahead" if ahead else "# Soak",
            "",
            f"Made by `python -m tests.benchmarks.soak --steps {arguments.steps} --kills {arguments.kills} "
            f"--until {arguments.until}{option}` (`make soak`), seed {arguments.seed}: {arguments.steps} "
            f"steps of a tiny random model on CPU with two engines{kind}, rollout.max_staleness={ahead}. In "
            f"{arguments.kills} of the first {arguments.until} steps, at a random moment of each, a process "
            f"was killed with SIGKILL. It took {seconds / 60:.0f} minutes.",
            "",
            f"- Killed: {killed}. Engines restarted: {last['restarts/engines']:.0f}. Resumed from the last "
            f"checkpoint: {last['restarts/recoveries']:.0f} times. Ray restarts reward workers.",
            "- Every step is in metrics.jsonl once, with all of its samples, and every prompt in one step: "
            f"{'no' if lost else 'yes'}.",
            f"- Left behind at the end: {remains}. Most named actors at once: {watch.most_actors}.",
            "",
            f"Resident memory, without shared pages, of processes that lived for {LEAST_STEPS} steps or "
            "more, in the second half of their lives. The slope is the steepest of the role's processes, "
            f"by least squares. With `{' '.join(f'{name}={value}' for name, value in SHAPES.items())}`, "
            "because otherwise an engine on a CPU grows for hundreds of steps, until oneDNN has filled its "
            "cache of 1,024 compiled shapes.",
            "",
            "| process | processes | largest, MiB | slope, MiB a step |",
            "| --- | ---: | ---: | ---: |",
            *rows,
            "",
            *(
                ["Not as it should be: " + " ".join(lost + wrong), ""]
                if lost + wrong
                else []
            ),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
