"""Does a small student learn faster from a teacher, or from itself with the solution, than from rewards
alone?

    python -m tests.benchmarks.distillation [--steps 100] [--seeds 0] [--folder runs/distillation]

A student of 1M is warmed up on the addition example, with and without solutions before its prompts. Each run
continues from it. Runs what is not in the folder yet (20 minutes on 2 quiet cores), then writes the table and
the picture of docs/distillation.md. Run `make fit` once before: it makes the teacher's model.
"""

import json
import random
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot

from examples.addition import data
from examples.addition.plot import curve
from examples.addition.warm_start import CACHE, CLEAN_SHARE, CORRUPTION, create_model
from tests.benchmarks.command import read_options, replace_measured

CONFIG, SFT = "examples/addition/config.yaml", "examples/addition/sft.yaml"
DOCUMENT, PICTURE = Path("docs/distillation.md"), Path("docs/distillation.png")
SECTION = """
## A student of 1M

Written by `python -m tests.benchmarks.distillation`: the addition example of 32 prompts with 8 responses a step,
8 mini-batches, each run from the same warm-started student. The learning rate is 2e-4 with a reward and 5e-4 without,
with a cosine. The teacher is the quickstart's model of 3M, trained further on right responses. Distributions are
compared over the vocabulary by `forward_kl`, coefficient 1. "Itself with the solution" is the student as it was at the
start, which reads the record's solution before the prompt. Exact match of 512 held-out problems, sampled at
temperature 1, without the solution. The teacher has {teacher:.3f}.

With an empty `teacher.path` the teacher moves with the policy, and both can drift away from the task: watch
`policy/entropy`.

![Exact match of training responses over steps](distillation.png)

"""
TAUGHT = (
    "algorithm.loss.distillation.coefficient=1",
    "algorithm.loss.distillation.over=vocabulary",
    "algorithm.loss.distillation.divergence=forward_kl",
)
ALONE = ("algorithm.advantage=none", "policy.optimizer.learning_rate=5e-4")
UPDATES = (
    "batch.mini_batches=8",
    "policy.optimizer.warmup_steps=20",
    "policy.optimizer.schedule=cosine",
)
WITH_SOLUTION = (
    *TAUGHT,
    "teacher.path={folder}/student/model",
    "teacher.context_key=solution",
    "teacher.context_template='{context}={prompt}'",
)
RUNS: dict[str, tuple[str, ...]] = {
    "reward": (),
    "teacher of 3M": (
        *TAUGHT,
        *ALONE,
        "teacher.path={folder}/teacher/model",
        "run.steps=200",
    ),
    "reward and itself with the solution": WITH_SOLUTION,
    "itself with the solution": (*WITH_SOLUTION, *ALONE),
}
SOLUTION_TOKENS, STUDENT_STEPS, TEACHER_STEPS, BATCH = 160, 600, 100, 32


def student_records(rng: random.Random) -> Iterator[dict[str, str]]:
    """Right responses, then some with wrong digits, except where the solution stands before the prompt."""
    for number in range(STUDENT_STEPS * BATCH):
        a, b = data.problem(rng, held_out=False, any_length=0.2)
        prompt, solution = data.prompt(a, b), data.solution(a, b)
        if number % 2:
            yield {"prompt": f"{solution}={prompt}", "response": solution}
        else:
            corruption = 0.0 if number < CLEAN_SHARE * STUDENT_STEPS * BATCH else CORRUPTION
            yield {"prompt": prompt, "response": data.corrupted(solution, corruption, rng)}


def teacher_records(rng: random.Random) -> Iterator[dict[str, str]]:
    for _ in range(TEACHER_STEPS * BATCH):
        a, b = data.problem(rng, held_out=False)
        yield {"prompt": data.prompt(a, b), "response": data.solution(a, b)}


def warm_up(
    folder: Path, name: str, model: Path, records: Iterator[dict[str, str]], *overrides: str
) -> None:
    """Train `folder/name/model` on given responses, unless it is there."""
    if (folder / name / "model" / "config.json").exists():
        return
    file = folder / f"{name}.jsonl"
    data.write_records(file, records)
    given = [
        "run.resume=auto",
        "run.checkpoint_every=150",
        f"run.dir={folder}",
        f"run.name={name}",
    ]
    given += [f"model.path={model}", f"data.train={file}", *overrides]
    command("controller.sft", SFT, f"data.max_tokens={SOLUTION_TOKENS}", *given)


def command(module: str, config: str, *overrides: str) -> None:
    subprocess.run(
        [sys.executable, "-m", module, "--config", config, *overrides], check=True
    )


def train(folder: Path, name: str, seed: int, steps: int) -> None:
    chosen = [
        f"run.dir={folder}",
        f"run.name={name}",
        f"run.seed={seed}",
        f"run.steps={steps}",
        "run.resume=auto",
    ]
    chosen += [f"model.path={folder}/student/model", *UPDATES]
    chosen += [
        setting.replace("{folder}", str(folder))
        for setting in RUNS[name.rpartition("-")[0].replace("_", " ")]
    ]
    command("controller.fit", CONFIG, *chosen)


def teacher_match(folder: Path) -> float:
    """Sampled exact match of the teacher on the held-out problems."""
    found = folder / "teacher_evaluation" / "metrics.json"
    if not found.exists():
        model, output = f"{folder}/teacher/model", f"{folder}/teacher_evaluation"
        command(
            "ballast.sampling_commands.evaluate",
            CONFIG,
            "--model",
            model,
            "--output",
            output,
        )
    return float(json.loads(found.read_text())["metrics"]["exact_match"]["value"])


def row(run: Path, name: str, seed: int, wanted: float) -> str:
    validation = json.loads((run / "summary.json").read_text())["validation"]
    before, after = (validation[when]["exact_match"] for when in ("before", "after"))
    first = next(
        (step for step, value in zip(*smooth(run), strict=True) if value >= wanted), None
    )
    steps, gain = curve(run, "reward/exact_match")[0][-1], f"{after - before:+.3f}"
    cells = (
        name,
        seed,
        steps,
        f"{before:.3f}",
        f"{after:.3f}",
        gain,
        first or "not reached",
    )
    return f"| {' | '.join(map(str, cells))} |\n"


def smooth(run: Path) -> tuple[list[int], list[float]]:
    steps, values = curve(run, "reward/exact_match")
    return steps, [
        statistics.fmean(values[max(0, i - 2) : i + 1]) for i in range(len(values))
    ]


def draw(runs: dict[tuple[str, int], Path], teacher: float) -> None:
    figure, axes = pyplot.subplots(figsize=(8, 4), layout="constrained")
    for (name, seed), run in runs.items():
        label = name if seed == min(each for _, each in runs) else None
        axes.plot(*smooth(run), color=f"C{list(RUNS).index(name)}", label=label)
    axes.axhline(
        teacher, color="grey", linestyle="--", label="the teacher, on held-out problems"
    )
    axes.set(
        xlabel="step",
        ylabel="exact match of training responses\n(mean of 3 steps)",
        ylim=(0, 1),
    )
    axes.grid(alpha=0.3)
    axes.legend(frameon=False, loc="lower right")
    figure.savefig(PICTURE, dpi=110)


def write(runs: dict[tuple[str, int], Path], teacher: float) -> None:
    """Replace the measured section of the page."""
    wanted = teacher - 0.05
    columns = (
        "learns from",
        "seed",
        "steps",
        "before",
        "after",
        "gain",
        f"first step at {wanted:.2f}",
    )
    head = f"{SECTION.format(teacher=teacher)}| {' | '.join(columns)} |\n{'| --- ' * len(columns)}|\n"
    table = "".join(row(run, *pair, wanted) for pair, run in runs.items())
    replace_measured(DOCUMENT, head + table)


def main() -> None:
    options = read_options(__doc__, seeds=[0], steps=100, folder=Path("runs/distillation"))
    folder: Path = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    if not (folder / "random" / "config.json").exists():
        create_model(folder / "random", seed=0, width=128, layers=6, positions=256)
    warm_up(folder, "student", folder / "random", student_records(random.Random(0)))
    teacher = (
        "data.max_tokens=96",
        "policy.optimizer.learning_rate=5e-4",
        "policy.optimizer.warmup_steps=10",
    )
    warm_up(folder, "teacher", CACHE / "model", teacher_records(random.Random(1)), *teacher)
    runs = {
        (name, seed): folder / f"{name.replace(' ', '_')}-{seed}"
        for seed in options.seeds
        for name in RUNS
    }
    for (_, seed), path in runs.items():
        if not (path / "summary.json").exists():
            train(folder, path.name, seed, options.steps)
    match = teacher_match(folder)
    write(runs, match)
    draw(runs, match)
    print(DOCUMENT.read_text())


if __name__ == "__main__":
    main()
