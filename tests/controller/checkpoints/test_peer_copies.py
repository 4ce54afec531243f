"""A run continues from the newest step that all ranks have in memory, and each copy is on two nodes if it can
be.
"""

from hypothesis import given
from hypothesis import strategies as st

from controller.checkpoints.peer_copies import (
    GENERATIONS,
    CopyHolder,
    Rank,
    RestorePlan,
    copy_nodes,
    plan_restore,
)

NODES = st.sampled_from(["a", "b", "c", "d"])
RANKS = st.tuples(st.sampled_from(["policy", "critic"]), st.integers(0, 2))
HELD = st.dictionaries(
    NODES, st.lists(st.tuples(RANKS, st.integers(1, 4)), max_size=12), max_size=4
)


@given(st.lists(NODES, min_size=1, max_size=8), NODES)
def test_every_rank_has_a_copy_after_any_node_is_lost(
    nodes: list[str], lost_node: str
) -> None:
    copies = copy_nodes(nodes)
    for node, rank_nodes in zip(nodes, copies, strict=True):
        assert rank_nodes[0] == node
        assert set(rank_nodes) <= set(nodes)
        assert len(set(rank_nodes)) == len(rank_nodes) == min(2, len(set(nodes)))
        if len(set(nodes)) > 1:
            assert set(rank_nodes) - {lost_node}


@given(HELD, st.sets(RANKS, min_size=1))
def test_the_restored_step_is_the_newest_that_all_ranks_have(
    held: dict[str, list[tuple[Rank, int]]], ranks: set[Rank]
) -> None:
    def is_complete(step: int) -> bool:
        return all(
            any((rank, step) in copies for copies in held.values()) for rank in ranks
        )

    plan = plan_restore(held, ranks)
    complete_steps = [step for step in range(1, 5) if is_complete(step)]
    assert (plan.step if plan else None) == max(complete_steps, default=None)
    if plan is not None:
        assert plan.sources.keys() == ranks
        assert all((rank, plan.step) in held[node] for rank, node in plan.sources.items())


def test_a_copy_of_a_lost_node_is_read_from_its_neighbour() -> None:
    held = {"b": [(("policy", 0), 4), (("policy", 1), 4), (("policy", 1), 6)]}
    plan = plan_restore(held, [("policy", 0), ("policy", 1)])
    assert plan == RestorePlan(4, {("policy", 0): "b", ("policy", 1): "b"})
    assert plan_restore({}, [("policy", 0)]) is None
    assert plan_restore(held, []) is None


@given(st.lists(st.integers(1, 9), unique=True, min_size=1).map(sorted), st.integers(0, 9))
def test_a_holder_has_the_last_copies_up_to_the_restored_step(
    steps: list[int], restored: int
) -> None:
    holder = CopyHolder()
    for step in steps:
        holder.hold("policy", 0, step, f"copy {step}")
    latest = steps[-GENERATIONS:]
    assert holder.held() == [(("policy", 0), step) for step in latest]
    holder.drop_after(restored)
    assert holder.held() == [(("policy", 0), step) for step in latest if step <= restored]
    for (role, index), step in holder.held():
        assert holder.read(role, index, step) == f"copy {step}"
