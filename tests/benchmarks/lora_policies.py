"""Two LoRA policies of one base model: trained side by side, and one after the other. Steps an hour on 2 CPU cores.

    python -m tests.benchmarks.lora_policies [--steps 12] [--rounds 3] [--updates 6]

The quickstart's model and prompts. Each step of a policy samples, makes `--updates` and publishes. Sampling takes as
long as about six updates, so that neither engine nor trainer is what all waits for. Side by side, engines sample for
one policy while the other learns, or for both. Engine and trainer have one thread each, in both ways. Medians of
rounds, in turn.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import ballast
from controller.algorithm.advantages import sequence_advantages
from controller.open_run import OpenRun

WARM_UP = 2
PROMPTS, SAMPLES = 16, 8
POLICIES = ("a", "b")
SETTINGS: dict[str, Any] = {
    "data.validation": "",
    "rollout.replicas": 1,
    "rollout.sampling.max_new_tokens": 64,
    "policy.data_parallel": 1,
    "policy.threads": 1,
    "policy.optimizer.learning_rate": 1e-5,  # lengths stay as they are
    "model.lora": {"rank": 16, "policies": len(POLICIES)},
    "run.checkpoint_every": 0,
}


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
    asked, published = {policy: sample(run, policy) for policy in POLICIES}, list[Future[int]]()
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
    parser.add_argument("--steps", type=int, default=12, help="of each policy, in each round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--updates", type=int, default=6, help="on the samples of a step")
    parser.add_argument("--config", default="examples/addition/config.yaml")
    arguments = parser.parse_args(argv)
    seconds: dict[str, list[float]] = {way.__name__: [] for way in WAYS}
    with tempfile.TemporaryDirectory() as folder:
        overrides = SETTINGS | {"run.dir": folder, "run.name": "policies"}
        with ballast.open(arguments.config, overrides=overrides) as run:
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
