"""Two LoRA policies of one base model: trained side by side, and one after the other. Steps an hour on 2 CPU
cores.

    python -m tests.benchmarks.lora_policies [--size 5M] [--steps 4] [--rounds 3] [--updates 2]

A random model and prompts as in `step_time`, with which sampling takes about as long as two updates. Each
step of a policy samples 64 responses, makes `--updates` and publishes. Side by side, engines sample for one
policy while the other learns, or for both. Engine and trainer have one thread each, in both ways. Medians of
rounds, in turn.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import ballast
from ballast.loop.open_run import OpenRun
from controller.algorithm.advantages import sequence_advantages
from tests.benchmarks.step_time import PROMPTS, SIZES, Setting, make_inputs

WARM_UP = 2
SAMPLES = 8
POLICIES = ("a", "b")
SETTINGS = [
    *("model.lora.rank=16", f"model.lora.policies={len(POLICIES)}"),
    *("data.validation=", "run.checkpoint_every=0", "resources.dashboard=false"),
]


def learn(run: OpenRun, policy: str, samples: Any, updates: int) -> Future[int]:
    batch = samples.batch
    advantages = sequence_advantages(run.config.algorithm, batch, batch["reward"])
    for _ in range(updates):
        run.forward_backward(batch, columns={"advantages": advantages}, adapter=policy)
        run.step(adapter=policy)
    return run.publish(adapter=policy)


def sample(run: OpenRun, policy: str) -> Future[Any]:
    return run.sample(run.prompts(PROMPTS), n=SAMPLES, adapter=policy)


def one_after_the_other(run: OpenRun, steps: int, updates: int) -> None:
    for policy in POLICIES:
        for _ in range(steps):
            learn(run, policy, sample(run, policy).result(), updates).result()


def side_by_side(run: OpenRun, steps: int, updates: int) -> None:
    asked, published = (
        {policy: sample(run, policy) for policy in POLICIES},
        list[Future[int]](),
    )
    for number in range(steps):
        for policy in POLICIES:
            published.append(learn(run, policy, asked[policy].result(), updates))
            if number + 1 < steps:
                asked[policy] = sample(run, policy)
    for each in published:
        each.result()


WAYS: tuple[Callable[[OpenRun, int, int], None], ...] = (one_after_the_other, side_by_side)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", choices=SIZES, default="5M", help="of the model")
    parser.add_argument(
        "--steps", type=int, default=4, help="of each policy, in each round"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=2, help="on the samples of a step")
    arguments = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {way.__name__: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        usual = make_inputs(Path(folder), Setting(arguments.size))
        settings = [*usual, *SETTINGS, f"run.dir={folder}", "run.name=policies"]
        with ballast.open(Path(folder) / "config.yaml", overrides=settings) as run:
            for policy in POLICIES:
                run.publish(adapter=policy).result()
            side_by_side(run, WARM_UP, arguments.updates)
            for _ in range(arguments.rounds):
                for way in WAYS:
                    began = time.monotonic()
                    way(run, arguments.steps, arguments.updates)
                    seconds[way.__name__].append(time.monotonic() - began)
    print("| way | seconds | steps an hour |\n| --- | ---: | ---: |")
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    for name, median in medians.items():
        steps = arguments.steps * len(POLICIES)
        print(f"| {name.replace('_', ' ')} | {median:.1f} | {steps / median * 3600:.0f} |")
    one, both = (medians[way.__name__] for way in WAYS)
    print(f"\n{one / both:.2f} times the steps an hour")


if __name__ == "__main__":
    main()
