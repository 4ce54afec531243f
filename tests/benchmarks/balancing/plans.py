"""Plans: step time against its lower bound, caps over random batches, planning time."""

import pickle
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from balancing import CostModel, Plan, plan_batch
from balancing.analysis.distributions import DEFAULT_CAP, DISTRIBUTIONS, draw
from balancing.analysis.statistics import computed_tokens
from balancing.basics.alignment import round_up
from balancing.cost_model import SEVEN_BILLION
from balancing.errors import CountError
from balancing.search.lower_bounds import step_time_bound
from tests.benchmarks.balancing.table import Table, cpu_seconds

COST_MODEL = CostModel.from_model_config(SEVEN_BILLION)
REALISTIC = ("lognormal", "reasoning", "agentic", "uniform", "grouped", "equal")
ADVERSARIAL = tuple(name for name in DISTRIBUTIONS if name not in REALISTIC)
MINI_BATCHES = 4
SHAPES = ((8192, 64), (4096, 32))
"""Sequences and ranks of a global batch."""
SEEDS = range(3)
RANDOM_BATCHES = 3_000
REPETITIONS = 3


@dataclass(frozen=True)
class Batch:
    """A seeded global batch with random mini-batches."""

    lengths: NDArray[np.int64]
    ranks: int
    max_tokens: int
    mini_batches: list[NDArray[np.int64]]

    @classmethod
    def draw(
        cls,
        name: str,
        count: int,
        ranks: int,
        seed: int,
        cap_over_longest: float | None = 2.0,
    ) -> "Batch":
        """cap_over_longest: None takes the cap that the adversarial lengths are made for."""
        lengths = draw(name, count, seed)
        cap = (
            DEFAULT_CAP
            if cap_over_longest is None
            else int(cap_over_longest * lengths.max())
        )
        members = np.array_split(
            np.random.default_rng(seed).permutation(len(lengths)), MINI_BATCHES
        )
        return cls(lengths, ranks, cap, members)

    def plan(self) -> Plan:
        return plan_batch(
            self.lengths,
            ranks=self.ranks,
            mini_batches=self.mini_batches,
            max_tokens=self.max_tokens,
            cost_model=COST_MODEL,
        )

    def bounds(self, plan: Plan) -> NDArray[np.float64]:
        """The lower bound on the time of each mini-batch of `plan`."""
        return np.array([
            step_time_bound(
                self.lengths[mini_batch.rows],
                plan.workloads[mini_batch.rows],
                ranks=self.ranks,
                steps=mini_batch.steps,
                max_tokens=self.max_tokens,
                max_sequences=len(self.lengths),
            ).time
            for mini_batch in plan.mini_batches
        ])  # fmt: skip


def tables() -> list[Table]:
    """All of this half."""
    return [
        step_times("Step time, cap of twice the longest sequence", REALISTIC, 2.0),
        step_times("Step time, cap of the longest sequence", REALISTIC, 1.0),
        step_times("Step time, adversarial lengths", ADVERSARIAL, None),
        violations(),
        planning_times(),
    ]


def step_times(title: str, names: tuple[str, ...], cap_over_longest: float | None) -> Table:
    rows = []
    for name in names:
        for count, ranks in SHAPES:
            rows.append(_step_time_row(name, count, ranks, cap_over_longest))
    return Table(
        title,
        [
            "lengths",
            "sequences x ranks",
            "cap",
            "over ideal",
            "lower bound",
            "above bound, mean",
            "worst",
        ],
        rows,
        f"Time of synchronous micro-steps over workload / ranks, - 1: mean over {len(SEEDS)} batches of "
        f"{MINI_BATCHES} random mini-batches, and the same for the lower bound "
        "(balancing/search/lower_bounds.py). Above bound: percentage points between the two, of the mean and "
        "the worst mini-batch. Costs of a "
        "7B-like Qwen2.5.",
    )


def _step_time_row(
    name: str, count: int, ranks: int, cap_over_longest: float | None
) -> list[str]:
    over, least, caps = [], [], []
    for seed in SEEDS:
        batch = Batch.draw(name, count, ranks, seed, cap_over_longest)
        plan = batch.plan()
        ideal = np.array([plan.workloads[m.rows].sum() / ranks for m in plan.mini_batches])
        over += ((_times(plan)) / ideal - 1).tolist()
        least += (batch.bounds(plan) / ideal - 1).tolist()
        caps.append(batch.max_tokens)
    gap = np.subtract(over, least)
    figures = [np.mean(over), np.mean(least), gap.mean(), gap.max()]
    return [
        name,
        f"{count} x {ranks}",
        f"{max(caps):,}",
        *(f"{100 * max(figure, 0.0):.3f} %" for figure in figures),
    ]


def _times(plan: Plan) -> NDArray[np.float64]:
    return np.array([times.sum() for times in plan.predicted_times()])


def violations() -> Table:
    """Every micro-batch of random plans is checked against every cap."""
    generator = np.random.default_rng(0)
    checked = violated = refused = 0
    for _ in range(RANDOM_BATCHES):
        try:
            plan = _random_plan(generator)
        except CountError:
            refused += 1
            continue
        micro_batches, above = _above_caps(plan)
        checked, violated = checked + micro_batches, violated + above
    rows = [["random", f"{RANDOM_BATCHES:,}", f"{checked:,}", str(violated), str(refused)]]
    for name in (*REALISTIC, *ADVERSARIAL):
        counted = [
            _above_caps(Batch.draw(name, 4096, 32, seed, None).plan()) for seed in SEEDS
        ]
        micro_batches, above = np.sum(counted, axis=0)
        rows.append([name, str(len(SEEDS)), f"{micro_batches:,}", str(above), "0"])
    return Table(
        "Cap violations",
        ["lengths", "batches", "micro-batches", "above a cap", "refused"],
        rows,
        "Random: 1 to 96 sequences, 1 to 8 ranks, 1 to 3 mini-batches, both layouts, all algorithms and "
        "orders, caps on sequences, counts and multiples. Refused: counts that contradict the number of "
        "sequences.",
    )


def _random_plan(generator: np.random.Generator) -> Plan:
    count = int(generator.integers(1, 97))
    lengths = generator.integers(1, int(generator.integers(2, 400)), count)
    multiple = int(generator.choice([1, 1, 4, 16]))
    longest = int(round_up(lengths, multiple).max())
    return plan_batch(
        lengths,
        ranks=int(generator.integers(1, 9)),
        mini_batches=np.array_split(
            generator.permutation(count), min(count, int(generator.integers(1, 4)))
        ),
        max_tokens=int(generator.integers(longest, 4 * longest + 1)),
        max_sequences=None if generator.random() < 0.5 else int(generator.integers(1, 9)),
        min_count=int(generator.integers(1, 4)),
        multiple_of=int(generator.integers(1, 3)),
        cost_model=COST_MODEL if generator.random() < 0.5 else None,
        algorithm=generator.choice(
            ["karmarkar_karp"] * 4 + ["none", "verl", "roll", "mindspeed_rl"]
        ).item(),
        order=generator.choice(["descending", "small_ends"]).item(),
        layout=generator.choice(["packed", "packed", "padded"]).item(),
        length_multiple=multiple,
    )


def _above_caps(plan: Plan) -> tuple[int, int]:
    """Micro-batches of a plan, and how many of them are above the cap on tokens or on sequences."""
    sizes = round_up(plan.lengths, plan.length_multiple)
    most = plan.settings.max_sequences or len(plan.lengths)
    parts = [
        rows
        for mini_batch in plan.mini_batches
        for step in mini_batch.micro_steps
        for rows in step.ranks
    ]
    above = [
        computed_tokens(sizes[rows], plan.layout) > plan.max_tokens or len(rows) > most
        for rows in parts
    ]
    return len(parts), sum(above)


def planning_times() -> Table:
    rows = [_time_row(name, Batch.draw(name, 8192, 64, 0)) for name in REALISTIC]
    rows += [
        _time_row(f"{name}, tight cap", Batch.draw(name, 8192, 64, 0, 1.0))
        for name in REALISTIC
    ]
    rows += [_time_row(name, Batch.draw(name, 16384, 64, 0, None)) for name in ADVERSARIAL]
    rows += [_time_row("lognormal", Batch.draw("lognormal", 2048, 4, 0))]
    return Table(
        "Planning time",
        ["lengths", "sequences x ranks", "plan_batch", "pickled plan", "to pickle"],
        rows,
        f"{MINI_BATCHES} mini-batches, median of {REPETITIONS}. The cap is twice the longest sequence. For "
        f"`tight` it is the longest, for `adversarial` {DEFAULT_CAP:,}.",
    )


def _time_row(name: str, batch: Batch) -> list[str]:
    plan = batch.plan()
    sent = pickle.dumps(plan, protocol=5)
    figures = [
        f"{1e3 * cpu_seconds(batch.plan, REPETITIONS):.1f} ms",
        f"{len(sent) / 1024:.0f} KiB",
    ]
    pickling = (
        f"{1e3 * cpu_seconds(lambda: pickle.dumps(plan, protocol=5), REPETITIONS):.2f} ms"
    )
    return [name, f"{len(batch.lengths)} x {batch.ranks}", *figures, pickling]
