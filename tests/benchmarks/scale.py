"""CPU seconds of plans of up to a million sequences, and a driver's time and memory in steps of 65,536
samples.

python -m tests.benchmarks.scale [--repeats 3] [--steps 4] [--output docs/scale-benchmark.md]

The driver's parts are the real ones: router, batch, plan, advantages, division among ranks. Engines and
trainers answer at once, with lengths and references and without tokens.
"""

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from balancing import Plan, plan_batch, plan_statistics
from balancing.pipelines.pipeline import Pipeline
from controller.algorithm.advantages import grpo
from controller.engines.router import Router
from controller.lifecycle.session import rare_collections
from controller.planning.planner import prefix_columns
from controller.rollout.samples import assemble
from tests.benchmarks.balancing.__main__ import machine
from tests.benchmarks.balancing.plans import COST_MODEL
from tests.benchmarks.command import read_options
from workers.batch.dispatch import (
    DispatchMode,
    Join,
    RankCoordinates,
    Split,
    split_arguments,
)
from workers.batch.score import Score
from workers.engine.prefix_hashes import hashed_places
from workers.engine.requests import SampleRequest, SampleResult

CAP, LONGEST = 32_768, 16_384
SAMPLES, SIZE, RANKS, ENGINES, PROMPT = 65_536, 16, 512, 64, 512
PAGE = """# Scale benchmark

Made by `python -m tests.benchmarks.scale --output {output}` on {machine}.

## Plans

CPU seconds of one thread, median of {repeats}, compiled code warm. Costs are those of a model of 7B, the cap is
32,768 tokens. Lognormal: median 1,500 tokens, sigma 0.9. Agentic: 60 % of 100 to 2,000 tokens, 40 % near 14,000.
Imbalance: the predicted time over workload / ranks, minus 1 (on a pipeline with its bubble). Above 32,768
sequences, plans within 1 % are final, below the error of a fitted cost model (1.4 %). Shared prompts have 512
tokens and 16 sequences each.

{plans}
## The driver

{steps} steps of 65,536 samples of 16,000 to 32,000 tokens for 512 ranks, on 64 engines: requests, routing, results,
batch, plan with shared prompts, advantages, and the division among ranks. Tokens and the network are left out. Texts of
responses above 1,000 tokens stay with the tokens.

{driver}
"""


def lengths_of(kind: str, count: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    if kind == "lognormal":
        return np.clip(rng.lognormal(np.log(1500), 0.9, count), 16, LONGEST).astype(
            np.int64
        )
    long = np.minimum(LONGEST, rng.normal(14_000, 1_500, count)).astype(np.int64)
    return np.where(rng.random(count) < 0.6, rng.integers(100, 2_000, count), long)


def cases() -> Iterator[tuple[str, str, int, int, Callable[[], Plan]]]:
    def case(
        name: str, kind: str, count: int, ranks: int, **options: object
    ) -> tuple[str, str, int, int, Callable]:
        lengths = lengths_of(kind, count) + (PROMPT if "prefix_groups" in options else 0)
        settings = {"ranks": ranks, "max_tokens": CAP, "cost_model": COST_MODEL} | options
        return name, kind, count, ranks, lambda: plan_batch(lengths, **settings)  # type: ignore[arg-type]

    shared = {
        "prefix_groups": np.arange(SAMPLES) // SIZE,
        "prefix_lengths": np.full(SAMPLES, PROMPT),
    }
    for kind in ("lognormal", "agentic"):
        yield case("plain", kind, 262_144, 512)
        yield case("plain", kind, 1 << 20, 4_096)
        yield case("shared prompts", kind, SAMPLES, 512, **shared)
        yield case("pipeline of 4", kind, SAMPLES, 128, pipeline=Pipeline(4))


def plans(repeats: int) -> str:
    rows = [
        "| plan | lengths | sequences | ranks | CPU seconds | micro-steps | imbalance |",
        "| --- " * 7 + "|",
    ]
    for name, kind, count, ranks, plan in cases():
        found, seconds = plan(), []  # the first call may compile
        for _ in range(repeats):
            start = time.process_time()
            found = plan()
            seconds.append(time.process_time() - start)
        stages = found.settings.pipeline.stages if found.settings.pipeline else 1
        over = (
            float(
                found.predicted_makespans().sum()
                / (found.computed_workloads.sum() / ranks / stages)
            )
            - 1
        )
        steps = sum(part.steps for part in found.mini_batches)
        row = (
            name,
            kind,
            f"{count:,}",
            f"{ranks:,}",
            f"{statistics.median(seconds):.2f}",
            f"{steps:,}",
            f"{over:.3%}",
        )
        rows.append(f"| {' | '.join(row)} |")
        print(rows[-1], flush=True)
    return "\n".join(rows) + "\n"


def resident() -> float:
    """MiB of this process."""
    (line,) = [
        line
        for line in Path("/proc/self/status").read_text().splitlines()
        if line.startswith("VmRSS")
    ]
    return int(line.split()[1]) / 1024


def step(number: int, ranks: list[RankCoordinates]) -> float:
    """Make a step of the driver. Returns MiB at its fullest: with the arguments of all ranks."""
    rng, router = (
        np.random.default_rng(number),
        Router(ENGINES, SAMPLES // ENGINES, max_retries=3),
    )
    prompts = [np.zeros(PROMPT, np.int32) for _ in range(SAMPLES // SIZE)]
    router.submit(
        SampleRequest(f"{row // SIZE}", row % SIZE, prompts[row // SIZE], row, priority=row)
        for row in range(SAMPLES)
    )
    responses = rng.integers(CAP // 2, CAP - PROMPT, SAMPLES).tolist()
    hashes, found, scores = rng.bytes(4 * len(hashed_places(CAP))), [], {}
    for replica, requests in router.assign(range(ENGINES)).items():
        for request in requests:
            tokens = responses[request.seed]
            # No two responses begin alike.
            own = request.seed.to_bytes(8, "little") + hashes[8:]
            result = SampleResult(
                request.uid,
                request.sample,
                PROMPT,
                tokens,
                "stop",
                number,
                row=0,
                prompt_hash=int(request.uid),
                prefix_hashes=own,
            )
            router.finish(replica, result)
            # Instead of a reference.
            found.append((result, request.seed.to_bytes(28, "little")))
            scores[result.key] = Score(float(rng.random() < 0.5), "")
    rollout = assemble(found, scores)
    rollout.metrics()
    batch = rollout.rows
    groups = np.unique(batch["uid"], return_inverse=True)[1]
    columns = (
        batch["prompt_hash"],
        batch["prompt_tokens"],
        batch["length"],
        batch["prefix_hashes"],
    )
    prefixes = prefix_columns(*columns, minimum=0)
    plan = plan_batch(
        batch["length"],
        ranks=RANKS,
        max_tokens=2 * CAP,
        cost_model=COST_MODEL,
        groups=groups,
        **prefixes,
    )
    plan_statistics(plan)
    batch = batch.with_columns(
        group_number=groups, advantages=grpo(batch["reward"], groups)
    )
    shares = split_arguments(
        DispatchMode(Split.PLAN, Join.TOKENS, ()),
        ranks,
        (batch, plan),
        {},
        put=lambda each: each,
    )
    assert len(shares) == RANKS
    return resident()


def driver(steps: int) -> str:
    ranks = [RankCoordinates(number, number) for number in range(RANKS)]
    step(0, ranks)  # compiles
    rows = [
        "| step | CPU seconds | MiB, fullest | MiB after it |",
        "| --- | --- | --- | --- |",
    ]
    for number in range(1, steps + 1):
        start = time.process_time()
        fullest = step(number, ranks)
        seconds = time.process_time() - start
        gc.collect()
        rows.append(f"| {number} | {seconds:.1f} | {fullest:,.0f} | {resident():,.0f} |")
        print(rows[-1], flush=True)
    return "\n".join(rows)


def main() -> None:
    options = read_options(__doc__, repeats=3, steps=4, output=None)
    with rare_collections():
        found = {"driver": driver(options.steps), "plans": plans(options.repeats)}
    if options.output:
        page = PAGE.format(
            output=options.output,
            machine=machine(),
            repeats=options.repeats,
            steps=options.steps,
            **found,
        )
        options.output.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
