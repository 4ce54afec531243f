"""Context-parallel degrees by micro-step against fixed ones: planned times, and ranks that sleep as long as
planned.

python -m tests.benchmarks.context_degrees [--seconds 4] [--repeats 3] [--output
docs/context-degrees-benchmark.md]

lengths --plan_batch--> fixed degrees, by micro-step --> time / (workload / ranks)
plan --> RANKS gloo processes: sleep, meet the ranks of the block, then all --> seconds, measured / predicted
"""

import os
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from statistics import median
from time import monotonic, sleep

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as multiprocessing
from numpy.typing import NDArray

from balancing import ContextDegrees, CostModel, Plan, plan_batch
from balancing.analysis.distributions import draw
from balancing.cost_model import SEVEN_BILLION, exchange_share
from balancing.mini_batch import degree_of
from tests.benchmarks.balancing.__main__ import machine
from tests.benchmarks.balancing.table import Table
from tests.benchmarks.command import read_options, write_page

COSTS = CostModel.from_model_config(SEVEN_BILLION)
NVLINK, NETWORK = 1, 9
"""How many times longer a link takes than NVLink: the 400 Gb/s card of a GPU."""
RANKS, MAXIMUM = 8, 8
INTRODUCTION = """# Context-parallel degrees by micro-step

Made by `python -m tests.benchmarks.context_degrees --output {output}` on {machine}.

"""
Case = tuple[str, NDArray[np.int64], int, int, int]
"""Name, lengths, ranks, cap of a rank, mini-batches."""


def main() -> None:
    """Plan, emulate, print, write."""
    options = read_options(__doc__, seconds=4.0, repeats=3, output=None)
    text = (
        planned().markdown() + "\n" + emulation(options.seconds, options.repeats).markdown()
    )
    sys.stdout.write(text)
    introduction = INTRODUCTION.format(output=options.output, machine=machine())
    write_page(options.output, introduction + text)


def cases() -> Iterator[Case]:
    one = draw("lognormal", 1024, 0)
    one[0] = 80_000
    yield "one of 80,000 tokens", one, 16, 98_304, 1
    random = np.random.default_rng(0)
    for mini_batches, sequences in ((1, 512), (16, 512)):
        short = np.clip(random.lognormal(np.log(800), 0.6, sequences), 16, 4096).astype(
            np.int64
        )
        lengths = np.where(random.random(sequences) < 0.6, short, 14_000)
        yield (
            f"60 % short, 40 % 14k, {mini_batches} mini-batches",
            lengths,
            16,
            16_384,
            mini_batches,
        )
    longest = np.where(random.random(512) < 0.02, 60_000, short)
    yield "98 % short, 2 % 60k", longest, 16, 8_192, 1


def planned() -> Table:
    rows = []
    for name, lengths, ranks, cap, mini_batches in cases():
        members = np.array_split(
            np.random.default_rng(0).permutation(len(lengths)), mini_batches
        )
        for link, slower in (("NVLink", NVLINK), ("network", NETWORK)):
            degrees = ContextDegrees(MAXIMUM, exchange_share(SEVEN_BILLION) * slower)
            ideal = float(COSTS.workload(lengths).sum()) / ranks
            plan = plan_batch(
                lengths,
                ranks=ranks,
                max_tokens=cap,
                mini_batches=members,
                cost_model=COSTS,
                context_degrees=degrees,
            )
            ours = float(plan.predicted_makespans().sum()) / ideal
            fixed = {
                each: _fixed(lengths, ranks, cap, members, degrees, each) / ideal
                for each in reversed(degrees.choices)
                if lengths.max() <= cap * each
            }
            best = min(fixed, key=lambda each: fixed[each])
            shown = [
                f"{100 * (time - 1):.1f} %"
                for time in (fixed[min(fixed)], fixed[best], ours)
            ]
            mean = float(np.average(degree_of(plan.mini_batches), weights=lengths))
            gains = [f"{fixed[each] / ours:.2f}" for each in (min(fixed), best)]
            rows.append(
                [name, link, str(min(fixed)), str(best), *shown, f"{mean:.2f}", *gains]
            )
    return Table(
        "Planned",
        [(
            "lengths"
        ), "link", "least degree", "best degree", "over ideal, least", "best", "by micro-step", "mean degree",
         "throughput over least", "over best"],
        rows,
        "Over ideal: time of synchronous micro-steps over workload / ranks, - 1, exchange included. Least: "
        "the smallest fixed degree whose cap holds the longest sequence. Costs and exchange of Qwen2.5-7B "
        f"(Ulysses), 16 ranks, caps of 98,304, 16,384 and 8,192 tokens a rank, degrees up to {MAXIMUM}. The "
        "network takes nine times as long for a byte as NVLink.",
    )  # fmt: skip


def _fixed(
    lengths: NDArray[np.int64],
    ranks: int,
    cap: int,
    members: list[NDArray[np.int64]],
    degrees: ContextDegrees,
    degree: int,
) -> float:
    costs = degrees.costs(COSTS, degree)
    shared = {"ranks": ranks // degree, "max_tokens": cap * degree}
    return float(
        plan_batch(lengths, **shared, mini_batches=members, cost_model=costs)
        .predicted_makespans()
        .sum()
    )


def emulation(seconds: float, repeats: int) -> Table:
    rows = []
    for name, lengths, _, cap, mini_batches in cases():
        degrees = ContextDegrees(MAXIMUM, exchange_share(SEVEN_BILLION) * NETWORK)
        members = np.array_split(
            np.random.default_rng(0).permutation(len(lengths)), mini_batches
        )
        plan = plan_batch(
            lengths,
            ranks=RANKS,
            max_tokens=cap,
            mini_batches=members,
            cost_model=COSTS,
            context_degrees=degrees,
        )
        ratios = [emulated(plan, seconds) / seconds for _ in range(repeats)]
        steps = sum(part.steps for part in plan.mini_batches)
        rows.append([name, str(steps), f"{median(ratios):.3f}", f"{max(ratios):.3f}"])
    return Table(
        f"Emulated on {RANKS} gloo ranks",
        ["lengths", "micro-steps", "measured / predicted, median", "worst"],
        rows,
        "Each rank sleeps for the time of its micro-batch, meets the ranks that share it in an all-reduce "
        f"of their group, and then all ranks. Plans are scaled to {seconds:g} s. {repeats} runs of each.",
    )


def emulated(plan: Plan, seconds: float) -> float:
    """Return the seconds from the first rank's start to the last rank's end."""
    times = np.concatenate(
        [
            part.predicted_times(plan.computed_workloads, "packed")
            for part in plan.mini_batches
        ]
    )
    times *= seconds / times.max(axis=1).sum()
    degrees = np.concatenate([part.degree_of_steps() for part in plan.mini_batches])
    with tempfile.TemporaryDirectory() as folder:
        ended = multiprocessing.get_context("fork").SimpleQueue()
        arguments = (times, degrees, f"file://{folder}/store", ended)
        multiprocessing.start_processes(_rank, arguments, RANKS, start_method="fork")
        spans = [ended.get() for _ in range(RANKS)]
    return max(end for _, end in spans) - min(start for start, _ in spans)


def _rank(
    rank: int,
    times: NDArray[np.float64],
    degrees: NDArray[np.int64],
    store: str,
    ended: object,
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=RANKS)
    blocks = {
        each: dist.new_subgroups_by_enumeration(
            np.arange(RANKS).reshape(-1, each).tolist()
        )[0]
        for each in (2, 4, 8)
    }
    with suppress(AttributeError, PermissionError):  # it only sleeps
        os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
    met = torch.zeros(1)
    dist.all_reduce(met)
    start = monotonic()
    for time, degree in zip(times[:, rank].tolist(), degrees.tolist(), strict=True):
        sleep(time)
        if degree > 1:
            dist.all_reduce(met, group=blocks[degree])
        dist.all_reduce(met)
    ended.put((start, monotonic()))  # type: ignore[attr-defined]
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
