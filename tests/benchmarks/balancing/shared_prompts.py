"""Plans of groups that share prompts: time and heaviest rank over their lower bounds, caps, planning time."""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from balancing import Plan, plan_batch
from balancing.analysis.statistics import lower_bound, predicted_grids, step_time
from tests.benchmarks.balancing.plans import COST_MODEL, REPETITIONS
from tests.benchmarks.balancing.table import Table, cpu_seconds

GROUPS, SAMPLES, RANKS = 512, 16, 64
LONGEST_RESPONSE = 8192
RESPONSES = ("lognormal", "grouped", "geometric", "uniform", "short")
PROMPTS = ((16, 256), (256, 2048))
MINI_BATCHES = ("1", "4 by sequence", "4 by group")
CAPS = (4.0, 2.0)
"""Caps of a micro-batch / the longest sequence."""
SHARES_ALIKE = (0.25, 0.75)
"""Neighbours begin alike for up to these shares of the shorter response."""


@dataclass(frozen=True, eq=False)
class Batch:
    """lengths, groups, prompts: int64 [n], of each sequence. mini_batches: index arrays.
    max_tokens: the cap.
    """

    lengths: NDArray[np.int64]
    groups: NDArray[np.int64]
    prompts: NDArray[np.int64]
    mini_batches: list[NDArray[np.int64]]
    max_tokens: int

    @classmethod
    def draw(
        cls,
        responses: str,
        prompts: tuple[int, int],
        mini_batches: str,
        cap: float,
        seed: int = 0,
    ) -> "Batch":
        """A seeded batch; prompts are evenly spread by their logarithm."""
        generator = np.random.default_rng(seed)
        own = _responses(responses, generator)
        each = np.rint(np.exp(generator.uniform(*np.log(prompts), GROUPS))).astype(np.int64)
        groups = np.repeat(np.arange(GROUPS), SAMPLES)
        lengths = own + each[groups]
        members = _mini_batches(mini_batches, groups, generator)
        return cls(lengths, groups, each[groups], members, int(cap * lengths.max()))

    def plan(self, **tree: NDArray[np.int64]) -> Plan:
        return plan_batch(
            self.lengths,
            ranks=RANKS,
            mini_batches=self.mini_batches,
            max_tokens=self.max_tokens,
            cost_model=COST_MODEL,
            prefix_groups=self.groups,
            prefix_lengths=self.prompts,
            **tree,  # type: ignore[arg-type]
        )

    def tree(self, share: float, seed: int = 0) -> dict[str, NDArray[np.int64]]:
        """Each response begins like the one before it with up to `share` of the shorter one's tokens, evenly
        drawn.
        """
        own = self.lengths - self.prompts
        shorter = np.minimum(own, np.append(own[:1], own[:-1])) - 1
        depths = np.random.default_rng(seed).uniform(0, share, len(own)) * shorter
        return {
            "tree_order": np.arange(len(own)),
            "tree_depths": self.prompts + depths.astype(np.int64),
        }


def _responses(name: str, generator: np.random.Generator) -> NDArray[np.int64]:
    """int64 [GROUPS * SAMPLES]; grouped: the responses to a prompt are of similar length."""
    count = GROUPS * SAMPLES
    drawn = {
        "lognormal": lambda: generator.lognormal(np.log(600), 1.0, count),
        "grouped": lambda: (
            np.repeat(generator.lognormal(np.log(600), 0.8, GROUPS), SAMPLES)
            * generator.lognormal(0, 0.6, count)
        ),
        "geometric": lambda: generator.geometric(1 / 1000, count),
        "uniform": lambda: generator.integers(16, 4097, count),
        "short": lambda: generator.geometric(1 / 100, count),
    }[name]()
    return np.clip(np.rint(drawn), 1, LONGEST_RESPONSE).astype(np.int64)


def _mini_batches(
    name: str, groups: NDArray[np.int64], generator: np.random.Generator
) -> list[NDArray[np.int64]]:
    if name == "1":
        return [np.arange(len(groups))]
    if name == "4 by sequence":
        return [
            np.sort(part) for part in np.array_split(generator.permutation(len(groups)), 4)
        ]
    return [
        np.flatnonzero(np.isin(groups, part))
        for part in np.array_split(generator.permutation(GROUPS), 4)
    ]


def tables() -> list[Table]:
    """One for each cap, and one of responses that begin alike."""
    return [*(_table(cap) for cap in CAPS), _table_of_trees()]


def _table(cap: float) -> Table:
    rows = [
        _row(responses, prompts, mini_batches, cap)
        for responses in RESPONSES
        for prompts in PROMPTS
        for mini_batches in MINI_BATCHES
    ]
    return Table(
        f"Shared prompts, cap of {cap:g} times the longest sequence",
        [
            "responses",
            "prompts",
            "mini-batches",
            "micro-steps",
            "heaviest rank",
            "time",
            "above the cap",
            "plan_batch",
        ],
        rows,
        f"{GROUPS} groups of {SAMPLES} on {RANKS} ranks. Workload of the heaviest rank, and time of "
        "synchronous micro-steps: over the lower bound on the time "
        "(balancing/search/lower_bounds.py), - 1. The bound need not be reachable. With about as many "
        "micro-batches as groups, heavy groups are divided, and each "
        "part computes the prompt again. The bound only counts this if a cap forces it. Above the cap: "
        f"micro-batches. plan_batch: all mini-batches, CPU time of its one thread, median of {REPETITIONS}.",
    )


def _row(
    responses: str, prompts: tuple[int, int], mini_batches: str, cap: float
) -> list[str]:
    batch = Batch.draw(responses, prompts, mini_batches, cap)
    plan = batch.plan()
    grids, bound = predicted_grids(plan), lower_bound(plan)
    heaviest = sum(grid.sum(axis=0).max() for grid in grids) / bound - 1
    above = sum(
        int((part.sums(plan.sizes) > plan.max_tokens).sum()) for part in plan.mini_batches
    )
    steps = ", ".join(str(part.steps) for part in plan.mini_batches)
    figures = [
        f"{100 * heaviest:.2f} %",
        f"{100 * (step_time(grids) / bound - 1):.2f} %",
        str(above),
    ]
    return [
        responses,
        "{}..{}".format(*prompts),
        mini_batches,
        steps,
        *figures,
        f"{1e3 * cpu_seconds(batch.plan, REPETITIONS):.0f} ms",
    ]


def _table_of_trees() -> Table:
    rows = [
        _row_of_tree(name, share, cap)
        for name in RESPONSES
        for share in SHARES_ALIKE
        for cap in CAPS
    ]
    return Table(
        "Responses with a common start",
        [
            "responses",
            "common",
            "cap",
            "shared, prompts known",
            "trees known",
            "time",
            "above the cap",
            "plan_batch",
        ],
        rows,
        f"{GROUPS} groups of {SAMPLES} on {RANKS} ranks, prompts of {PROMPTS[0][0]} to {PROMPTS[0][1]} "
        "tokens, one mini-batch. Common: the share of the shorter response up to which neighbours in a "
        "group are equal. Cap: times the longest sequence. Shared: tokens that another sequence of the "
        "micro-batch computes, counted by a plan that only knows prompts, and by a plan that knows trees. "
        "Time: the second plan / the first, each with all shared tokens of its micro-batches. Above the "
        "cap: micro-batches of the second plan. plan_batch: the second plan, CPU time of its one thread, "
        f"median of {REPETITIONS}.",
    )


def _row_of_tree(responses: str, alike: float, cap: float) -> list[str]:
    batch = Batch.draw(responses, PROMPTS[0], "1", cap)
    tree = batch.tree(alike)
    prompts, trees = batch.plan(), batch.plan(**tree)
    times = [
        step_time(predicted_grids(_with_tree(plan, trees))) for plan in (prompts, trees)
    ]
    above = sum(
        int((part.sums(trees.sizes) > trees.max_tokens).sum())
        for part in trees.mini_batches
    )
    seconds = cpu_seconds(lambda: batch.plan(**tree), REPETITIONS)
    return [
        responses,
        f"{100 * alike:.0f} %",
        f"{cap:g}",
        *(
            f"{100 * (1 - plan.computed_lengths.sum() / plan.lengths.sum()):.1f} %"
            for plan in (prompts, trees)
        ),
        f"{times[1] / times[0]:.3f}",
        str(above),
        f"{1e3 * seconds:.0f} ms",
    ]


def _with_tree(plan: Plan, known: Plan) -> Plan:
    """The plan with all that its micro-batches share, by the tree of another plan of the batch."""
    prefixes = known.shared_prefixes
    assert prefixes is not None
    shared = np.zeros_like(plan.lengths)
    for part in plan.mini_batches:
        shared[part.rows] = prefixes.select(part.rows).shared_tokens(
            part.micro_batch_of_rows()
        )
    return replace(plan, shared=shared)
