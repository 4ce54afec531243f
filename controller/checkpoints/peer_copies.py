"""Copies of a run's training state in host memory, from which it continues after a rank was lost.

complete step --every run.peer_copies--> each rank's bytes --> a process on its node, one on the next node
lost rank --> the newest step that all ranks of all roles have --> new ranks read their bytes

Invariants of the decisions: a rank's copies are on different nodes. A restored step is the newest that all
ranks have. Each rank reads from a process that holds this step.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from controller.checkpoints.progress import Progress
from workers.errors import BallastError, LostError, clause

if TYPE_CHECKING:
    from controller.actors.launch import WorkerGroups

Rank = tuple[str, int]
"""A role and the index of its rank."""

GENERATIONS = 2  # the last complete copy stays until the next is complete
ANSWER_SECONDS = 60.0


def copy_nodes(nodes: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the nodes that hold each rank's copy: its node, and the next one of the role's nodes, if any.

    nodes: of each rank.
    """
    order = sorted(set(nodes))
    neighbours = {node: order[(place + 1) % len(order)] for place, node in enumerate(order)}
    return [(node, neighbours[node]) if len(order) > 1 else (node,) for node in nodes]


@dataclass(frozen=True)
class RestorePlan:
    """The step to continue from, and the node whose process has each rank's copy."""

    step: int
    sources: dict[Rank, str]


def plan_restore(
    held: Mapping[str, Iterable[tuple[Rank, int]]], ranks: Iterable[Rank]
) -> RestorePlan | None:
    """Return the newest step of which every rank has a copy, and where. None without such a step.

    held: rank and step of each copy, by node.
    """
    sources: dict[int, dict[Rank, str]] = {}
    for node in sorted(held):
        for rank, step in held[node]:
            sources.setdefault(step, {}).setdefault(rank, node)
    wanted = set(ranks)
    complete_steps = [
        step for step, by_rank in sources.items() if wanted and wanted <= by_rank.keys()
    ]
    if not complete_steps:
        return None
    newest = max(complete_steps)
    return RestorePlan(newest, {rank: sources[newest][rank] for rank in wanted})


class CopyHolder:
    """Actor that holds copies of ranks, the last GENERATIONS of each."""

    def __init__(self) -> None:
        self._copies: dict[Rank, dict[int, Any]] = {}

    def hold(self, role: str, index: int, step: int, copy: Any) -> None:
        """copy: a `RankCopy`, which Ray's object store has until this returns."""
        copies = self._copies.setdefault((role, index), {})
        # Older ones go first: all ranks have the last step's.
        older_steps = sorted(number for number in copies if number != step)
        for old_step in older_steps[: 1 - GENERATIONS]:
            del copies[old_step]
        copies[step] = copy.in_own_memory()

    def held(self) -> list[tuple[Rank, int]]:
        return [(rank, step) for rank, copies in self._copies.items() for step in copies]

    def read(self, role: str, index: int, step: int) -> Any:
        return self._copies[role, index][step]

    def drop_after(self, step: int) -> None:
        """Drop copies of later steps, which the run makes again."""
        for copies in self._copies.values():
            for later_step in [number for number in copies if number > step]:
                del copies[later_step]


class PeerCopies:
    """The processes that hold a run's copies. They outlive its ranks, and end with `stop`."""

    def __init__(self) -> None:
        self._holders: dict[str, Any] = {}

    def begin(
        self, roles: "WorkerGroups", progress: Progress, log: Callable[[str], None]
    ) -> None:
        """Copy the state after `progress.step`. Returns when it is in each rank's host memory. Ranks send it
        on while training continues.
        """
        self._held(log)
        # Holders drop older copies for new ones, so all ranks of all roles must have the last step's.
        for group in roles.trained.values():
            group.wait_for_copies()
        for group in roles.trained.values():
            nodes = copy_nodes(group.node_id())
            holders = [[self._holder(node) for node in rank_nodes] for rank_nodes in nodes]
            group.send_copies(progress.step, progress.to_json(), holders)

    def restore(
        self, roles: "WorkerGroups", newer_than: int, log: Callable[[str], None]
    ) -> Progress | None:
        """Load the newest complete copy, unless a checkpoint is newer. Returns None without one.

        newer_than: step of the last checkpoint, -1 without one.
        """
        if not self._holders:
            return None
        held = self._held(log)
        ranks = [
            (role, rank.index)
            for role, group in roles.trained.items()
            for rank in group.ranks
        ]
        plan = plan_restore(held, ranks)
        if plan is None or plan.step < newer_than:
            reason = (
                "no step is complete"
                if plan is None
                else f"a checkpoint is newer than step {plan.step}"
            )
            log(f"run.peer_copies: {reason} in memory")
            return None
        states = {}
        try:
            for role, group in roles.trained.items():
                holders = [
                    self._holders[plan.sources[role, rank.index]] for rank in group.ranks
                ]
                states[role] = group.load_copies(plan.step, holders)
        except LostError:
            raise
        except BallastError as error:
            log(
                f"run.peer_copies: step {plan.step} cannot be loaded from memory: {clause(error)}"
            )
            return None
        log(
            f"going on from step {plan.step} in memory, from copies on {', '.join(sorted(held))}"
        )
        return Progress(**states["policy"])

    def drop_after(self, step: int) -> None:
        for holder in self._holders.values():
            holder.drop_after.remote(step)

    def stop(self) -> None:
        import ray

        for holder in self._holders.values():
            ray.kill(holder)
        self._holders.clear()

    def _holder(self, node: str) -> Any:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        if node not in self._holders:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
            options = {"num_cpus": 0, "max_restarts": 0, "scheduling_strategy": strategy}
            self._holders[node] = ray.remote(CopyHolder).options(**options).remote()
        return self._holders[node]

    def _held(self, log: Callable[[str], None]) -> dict[str, list[tuple[Rank, int]]]:
        """List the copies of each holder. Lost holders are logged and removed."""
        import ray
        from ray.exceptions import RayError

        held = {}
        for node, holder in list(self._holders.items()):
            try:
                held[node] = ray.get(holder.held.remote(), timeout=ANSWER_SECONDS)
            except RayError:
                log(f"run.peer_copies: the copies on node {node} are lost")
                del self._holders[node]
        return held


_COPIES: dict[Path, PeerCopies] = {}
"""By the run's folder. Global, because copies outlive an attempt's roles, which refer to all else."""


def copies_of(run_folder: Path) -> PeerCopies:
    return _COPIES.setdefault(run_folder.resolve(), PeerCopies())


def stop_copies(run_folder: Path) -> None:
    """End the processes with the run's copies, if any."""
    copies = _COPIES.pop(run_folder.resolve(), None)
    if copies is not None:
        copies.stop()
