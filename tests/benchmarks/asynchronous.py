"""What generating ahead gains with real parts: steps an hour by rollout.max_staleness, on two cores.

    python -m tests.benchmarks.asynchronous [--steps 24] [--rounds 2] [--output docs/asynchronous-benchmark.md]

An engine has one core and the trainer the other, as they have nodes of their own in a cluster. The model is
random and ends a response one time in 64, so that lengths are geometric: 64 tokens on average, at most 256.
Runs of every staleness take turns, so that all see the machine in the same minutes; the ratio of their
medians is what counts.
"""

import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import psutil
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from controller.observability.run_folder import RunFolder
from examples.addition import data
from examples.addition.warm_start import create_model
from tests.benchmarks.command import read_options, write_page

STALENESS = (0, 1, 2)
VOCABULARY, LONGEST = 64, 256
WARM_UP = 4  # steps that are not counted
CORES = {"VllmEngineActor": 0, "PolicyWorker": 1}
SETTINGS = (
    "data.max_prompt_tokens=26",
    "batch.prompts_per_step=8",
    "rollout.samples_per_prompt=4",
    f"rollout.sampling.max_new_tokens={LONGEST}",
    "rollout.threads=1",
    "policy.threads=1",
    "policy.max_tokens_per_micro_batch=2048",
    "policy.optimizer.learning_rate=1e-6",  # lengths stay as they are
    "reward.function=examples.addition.reward:reward",
    "tracking.tensorboard=false",
)
SHOWN = (
    ("time/weights_s", "weights, s"),
    ("rollout/trainer_idle_share", "trainer idle"),
    ("rollout/engine_idle_share", "engine idle"),
    ("rollout/staleness_mean", "age, mean"),
    ("rollout/staleness_max", "age, largest"),
    ("rollout/response_tokens_mean", "tokens a response"),
    ("policy/rollout_mismatch_mean", "mismatch, nats"),
)
HEADER = """# Asynchronous training on two cores

Written by `python -m tests.benchmarks.asynchronous` on two cores: one for an engine, one for the trainer. A random
model of 3M parameters makes {steps} steps of 8 prompts with 4 samples each. Lengths are geometric with mean 64 and at
most 256. Each row ran {rounds} times in turns. Values are medians over steps, except the largest age.

| `rollout.max_staleness` | seconds a step, in turns | steps an hour | of synchronous | {names} |
| ---: | --- | ---: | ---: | {lines} |
"""


def make_model(folder: Path) -> None:
    """A random model of the quickstart's size in the folder, which ends a response one time in 64."""
    create_model(folder, seed=0)
    config = AutoConfig.from_pretrained(folder)
    config.vocab_size, config.max_position_embeddings = VOCABULARY, 2 * LONGEST
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)


def make_inputs(folder: Path) -> list[str]:
    """A model and data in the folder; returns the settings that name them."""
    make_model(folder / "model")
    data.write(folder / "train.jsonl", 1024, seed=1, held_out=False)
    (folder / "config.yaml").write_text("")
    inputs = [
        f"model.path={folder / 'model'}",
        f"data.train={folder / 'train.jsonl'}",
        f"run.dir={folder / 'runs'}",
    ]
    return ["--config", str(folder / "config.yaml"), *inputs]


def run(
    settings: Sequence[str], folder: Path, name: str, staleness: int, steps: int
) -> list[dict[str, float]]:
    """The metrics of the counted steps of one run."""
    ahead = [f"rollout.max_staleness={staleness}"] if staleness else []
    command = [
        sys.executable,
        "-m",
        "controller.fit",
        *settings,
        *SETTINGS,
        *ahead,
        f"run.name={name}",
    ]
    process = subprocess.Popen([*command, f"run.steps={steps}"], stdout=subprocess.DEVNULL)
    while process.poll() is None:
        pin(process.pid)
        with suppress(subprocess.TimeoutExpired):
            process.wait(1.0)
    if process.returncode:
        raise SystemExit(f"{name} ended with code {process.returncode}")
    return RunFolder(folder / "runs" / name).metrics[1 + WARM_UP :]


def pin(driver: int) -> None:
    """Give every thread of the engine's and the trainer's actors its core."""
    with suppress(psutil.Error, OSError):  # of processes that end meanwhile
        for process in psutil.Process(driver).children(recursive=True):
            command = " ".join(process.cmdline())
            core = next((core for title, core in CORES.items() if title in command), None)
            for thread in process.threads() if core is not None else ():
                os.sched_setaffinity(thread.id, {core})


def row(
    staleness: int, runs: Sequence[Sequence[dict[str, float]]], synchronous: float
) -> str:
    """A line of the table."""
    times = [statistics.median(step["time/step_s"] for step in steps) for steps in runs]
    median = statistics.median(times)
    every = [step for steps in runs for step in steps]
    shown = [
        (max if name.endswith("_max") else statistics.median)(step[name] for step in every)
        for name, _ in SHOWN
    ]
    cells = [
        ", ".join(f"{one:.2f}" for one in times),
        f"{3600 / median:,.0f}",
        f"{synchronous / median:.2f}x",
    ]
    return (
        f"| {staleness} | "
        + " | ".join([*cells, *(f"{value:.3g}" for value in shown)])
        + " |"
    )


def main() -> None:
    """Run all and print the page."""
    arguments = read_options(__doc__, steps=24, rounds=2, output=None)
    found: dict[int, list[list[dict[str, float]]]] = {
        staleness: [] for staleness in STALENESS
    }
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        settings = make_inputs(folder)
        for turn in range(arguments.rounds):
            for staleness in STALENESS:
                steps = WARM_UP + arguments.steps
                found[staleness].append(
                    run(settings, folder, f"run-{staleness}-{turn}", staleness, steps)
                )
    synchronous = statistics.median(
        statistics.median(step["time/step_s"] for step in steps)
        for steps in found[STALENESS[0]]
    )
    names, lines = " | ".join(name for _, name in SHOWN), " | ".join("---:" for _ in SHOWN)
    page = HEADER.format(
        steps=arguments.steps, rounds=arguments.rounds, names=names, lines=lines
    )
    page += (
        "\n".join(row(staleness, runs, synchronous) for staleness, runs in found.items())
        + "\n"
    )
    print(page)
    write_page(arguments.output, page)


if __name__ == "__main__":
    main()
