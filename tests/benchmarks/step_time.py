"""How well the time model predicts a step on this machine: predictions first, measurements afterwards.

    python -m tests.benchmarks.step_time --predict     calibration runs, then tests/benchmarks/step_time.json: commit it
    python -m tests.benchmarks.step_time --measure     12 runs, compared with the file: docs/step-time-benchmark.md

Each `--measure` adds a round to tests/benchmarks/step_time_measured.json. The page has the medians of the
rounds, as a virtual machine can be slow for minutes. The calibration runs have other depths, prompts and
batches than the 12 configurations, and the same widths. Models are random and end a response about one time
in 64; predictions have the lengths that each model samples. Every rank and engine has one thread.
"""

import argparse
import json
import random
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from balancing.time_model import MACHINES, Efficiency, Machine, StepTime, step_time
from balancing.time_model.fitting import fit
from controller.config import load
from controller.data.records import read_records
from controller.observability.run_folder import RunFolder
from controller.preflight.cluster import Cluster
from controller.preflight.time_fit import WARM_UP, read_measurements
from controller.preflight.time_inputs import layout_of, shape_of, workload_of
from examples.addition.warm_start import create_model

PREDICTIONS, PAGE = (
    Path("tests/benchmarks/step_time.json"),
    Path("docs/step-time-benchmark.md"),
)
ROUNDS = Path("tests/benchmarks/step_time_measured.json")
VOCABULARY, LONGEST, PROMPT, PROMPTS, STEPS = 64, 192, 96, 8, 6
SIZES = {
    "1M": (128, 6),
    "2M": (128, 12),
    "5M": (256, 7),
    "8M": (256, 12),
    "11M": (512, 4),
    "20M": (512, 7),
}
"""Width and layers."""
TWO_CORES = Cluster(nodes=1, cpus=2)


@dataclass(frozen=True)
class Setting:
    """A run. prompts: of a step, each with 8 samples."""

    size: str
    ranks: int = 1
    engines: int = 1
    staleness: int = 0
    shared: bool = True
    prompts: int = PROMPTS
    prompt: int = PROMPT

    @property
    def name(self) -> str:
        shared = "" if self.shared else ", prompts not shared"
        return f"{self.size}, {self.ranks} ranks, {self.engines} engines, staleness {self.staleness}{shared}"


CALIBRATION = (
    Setting("2M", prompts=12, prompt=48),
    Setting("8M", prompts=6, prompt=48),
    Setting("11M", prompts=6, prompt=48),
    Setting("8M", ranks=2, engines=2, prompts=12, prompt=48),
)
SETTINGS = (
    Setting("1M"),
    Setting("5M"),
    Setting("20M"),
    Setting("1M", ranks=2, engines=2),
    Setting("5M", ranks=2, engines=2),
    Setting("20M", ranks=2, engines=2),
    Setting("5M", engines=2),
    Setting("5M", ranks=2),
    Setting("5M", staleness=1),
    Setting("5M", staleness=2),
    Setting("20M", staleness=1),
    Setting("5M", shared=False),
)
HEADER = """# Predicted and measured steps

Written by `python -m tests.benchmarks.step_time` on 2 CPU cores. The time model (`balancing/time_model`) was fitted to
{calibration} runs, each made four times, of the same widths and other depths, prompts and batches. It predicted these
{count} runs before they were made: random models, {prompts} prompts x 8 samples a step, prompts of {prompt} tokens,
responses of {longest} at most. Seconds are medians over {steps} steps, then over the rounds (made: {rounds}).
Goals: phases within 25 %, steps within 15 %, and the right order of any two runs that differ by more than 15 %.

"""


def make_inputs(folder: Path, setting: Setting) -> list[str]:
    """A random model and prompts in the folder; returns the command line's settings."""
    width, layers = SIZES[setting.size]
    model, train = (
        folder / f"model-{setting.size}",
        folder / f"prompts-{setting.prompt}.jsonl",
    )
    if not model.exists():
        create_model(
            model, seed=0, width=width, layers=layers, vocabulary=VOCABULARY, positions=512
        )
    rng = random.Random(0)
    rows = [
        {"prompt": "".join(rng.choices("0123456789", k=setting.prompt)), "solution": "12#3"}
        for _ in range(512)
    ]
    train.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (folder / "config.yaml").write_text("")
    return [
        f"model.path={model}",
        f"model.share_prefixes={'auto' if setting.shared else 'never'}",
        f"data.train={train}",
        f"data.max_prompt_tokens={setting.prompt}",
        f"batch.prompts_per_step={setting.prompts}",
        "rollout.samples_per_prompt=8",
        f"rollout.sampling.max_new_tokens={LONGEST}",
        f"rollout.replicas={setting.engines}",
        "rollout.threads=1",
        "rollout.cpu_kv_cache_gib=0.5",
        "policy.threads=1",
        f"policy.data_parallel={setting.ranks}",
        "policy.max_tokens_per_micro_batch=2048",
        "policy.optimizer.learning_rate=1e-6",
        "algorithm.zero_variance_groups=keep",
        "reward.function=examples.addition.reward:reward",
        "tracking.tensorboard=false",
        *([f"rollout.max_staleness={setting.staleness}"] if setting.staleness else []),
    ]


def run(folder: Path, setting: Setting, number: int) -> Path:
    """Make a run, and return its folder."""
    options = [
        *make_inputs(folder, setting),
        f"run.dir={folder / 'runs'}",
        f"run.name={number}",
    ]
    command = [
        sys.executable,
        "-m",
        "controller.fit",
        "--config",
        str(folder / "config.yaml"),
        *options,
    ]
    subprocess.run(
        [*command, f"run.steps={WARM_UP + STEPS}"], check=True, stdout=subprocess.DEVNULL
    )
    return folder / "runs" / str(number)


@lru_cache
def lengths_of(model: Path, train: Path) -> list[int]:
    """Lengths of responses that the model samples to the prompts: a random one ends them at a rate of its
    own.
    """
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    prompts = [
        tokenizer(record["prompt"], add_special_tokens=False)["input_ids"]
        for record in read_records(str(train))
    ]
    found = AutoModelForCausalLM.from_pretrained(model).generate(
        torch.tensor(prompts * 2),
        do_sample=True,
        top_k=0,
        max_new_tokens=LONGEST,
        pad_token_id=tokenizer.pad_token_id,
    )
    ends = (found[:, len(prompts[0]) :] == tokenizer.eos_token_id).float()
    return torch.where(ends.any(1), ends.argmax(1) + 1, LONGEST).tolist()


def predicted(
    folder: Path, setting: Setting, machine: Machine, efficiency: Efficiency
) -> StepTime:
    """Predict a setting, with the lengths that its model samples."""
    config = load(folder / "config.yaml", make_inputs(folder, setting))
    responses = lengths_of(Path(config.model.path), Path(config.data.train))
    work, layout = (
        workload_of(config, responses, [setting.prompt]),
        layout_of(config, TWO_CORES),
    )
    return step_time(shape_of(config), layout, work, machine, efficiency)


def phases_of(found: StepTime) -> dict[str, float]:
    """The prediction, by the phases that a run measures."""
    seconds = {name: phase.seconds for name, phase in found.phases.items()}
    start_and_end = seconds["other"] / 3
    return {
        "rollout": sum(seconds[name] for name in ("prefill", "decode", "reward"))
        + start_and_end,
        "update": sum(seconds[name] for name in ("update", "collectives", "optimizer"))
        + start_and_end,
        "weights": seconds["transfer"],
        "step": found.seconds,
    }


def predict(folder: Path) -> dict[str, Any]:
    """Fit to the calibration runs, each made four times, and predict all settings."""
    found = [
        read_measurements(run(folder, setting, number))
        for number, setting in enumerate(CALIBRATION * 4)
    ]
    machine, efficiency = fit(found, MACHINES["cpu"])
    settings = {
        each.name: phases_of(predicted(folder, each, machine, efficiency))
        for each in SETTINGS
    }
    return {
        "machine": asdict(machine),
        "efficiency": asdict(efficiency),
        "predicted": settings,
    }


def observed(folder: Path, setting: Setting, number: int) -> dict[str, float]:
    """Medians over the counted steps of a run."""
    rows = RunFolder(run(folder, setting, number)).metrics
    counted = [row for row in rows if row["step"] > WARM_UP]
    names = {
        "rollout": "time/rollout_s",
        "update": "time/update_s",
        "weights": "time/weights_s",
        "step": "time/step_s",
    }
    return {
        name: statistics.median(row[key] for row in counted) for name, key in names.items()
    }


def medians(rounds: list[dict[str, dict[str, float]]]) -> dict[str, dict[str, float]]:
    """Medians over the rounds, by run and phase."""
    return {
        name: {key: statistics.median(each[name][key] for each in rounds) for key in row}
        for name, row in rounds[0].items()
    }


def spread(rounds: list[dict[str, dict[str, float]]]) -> float:
    """By how much a step of a run differs most between rounds, as a share."""
    steps = [[each[name]["step"] for each in rounds] for name in rounds[0]]
    return max(max(each) / min(each) - 1 for each in steps)


def page(predictions: dict[str, Any], rounds: list[dict[str, dict[str, float]]]) -> str:
    """The table, and how many pairs of runs are in the right order."""
    found = medians(rounds)
    lines = [
        "| run | "
        + " | ".join(f"{name}, s" for name in ("rollout", "update", "weights", "step"))
        + " | step off |"
    ]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    near: dict[str, list[bool]] = {"phases": [], "steps": []}
    for name, real in found.items():
        said = predictions[name]
        stale = "staleness 0" not in name  # phases overlap
        shown = {key: f"{said[key]:.2f} / {real[key]:.2f}" for key in real}
        cells = ["" if stale and key == "rollout" else text for key, text in shown.items()]
        lines.append(
            f"| {name} | {' | '.join(cells)} | {said['step'] / real['step'] - 1:+.0%} |"
        )
        near["steps"].append(abs(said["step"] / real["step"] - 1) <= 0.15)
        near["phases"] += [
            abs(said[key] / real[key] - 1) <= 0.25
            for key in real
            if key != "step" and not (stale and key == "rollout")
        ]
    right, pairs = order(predictions, found)
    made = {
        "calibration": len(CALIBRATION),
        "count": len(found),
        "rounds": len(rounds),
        "steps": STEPS,
    }
    text = HEADER.format(**made, prompts=PROMPTS, prompt=PROMPT, longest=LONGEST)
    met = ", ".join(f"{sum(each)} of {len(each)} {name}" for name, each in near.items())
    goals = f"Within the goals: {met}, and the order of {right} of {pairs} pairs."
    noise = (
        f"Steps of the same run differ by up to {spread(rounds):.0%} between rounds."
        if len(rounds) > 1
        else ""
    )
    return (
        text
        + "\n".join(lines)
        + f"\n\nPredicted / measured. {goals} {noise}".rstrip()
        + "\n"
    )


def order(
    predictions: dict[str, Any], found: dict[str, dict[str, float]]
) -> tuple[int, int]:
    """Pairs of runs in the right order, and pairs that differ by more than 15 %."""
    names = list(found)
    pairs = [(a, b) for i, a in enumerate(names) for b in names[:i]]
    pairs = [
        (a, b) for a, b in pairs if abs(found[a]["step"] / found[b]["step"] - 1) > 0.15
    ]
    right = [
        (found[a]["step"] > found[b]["step"])
        == (predictions[a]["step"] > predictions[b]["step"])
        for a, b in pairs
    ]
    return sum(right), len(pairs)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--predict", action="store_true", help=f"write {PREDICTIONS}")
    parser.add_argument("--measure", action="store_true", help=f"write {PAGE}")
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        if arguments.predict:
            PREDICTIONS.write_text(json.dumps(predict(folder), indent=1) + "\n")
            print(PREDICTIONS.read_text())
        if arguments.measure:
            predictions = json.loads(PREDICTIONS.read_text())["predicted"]
            found = {}
            for number, setting in enumerate(SETTINGS, start=100):
                found[setting.name] = observed(folder, setting, number)
                print(
                    f"{setting.name}: {predictions[setting.name]}, measured {found[setting.name]}",
                    flush=True,
                )
            rounds = [*(json.loads(ROUNDS.read_text()) if ROUNDS.exists() else []), found]
            ROUNDS.write_text(json.dumps(rounds, indent=1) + "\n")
            PAGE.write_text(page(predictions, rounds))
            print(PAGE.read_text())


if __name__ == "__main__":
    main()
