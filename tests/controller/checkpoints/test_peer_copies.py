"""A run continues from the newest step that all ranks have in memory, and each copy is on two nodes if it can
be.
"""

from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.checkpoints.peer_copies import (
    GENERATIONS,
    CopyHolder,
    PeerCopies,
    Rank,
    copy_nodes,
    plan_restore,
)
from controller.checkpoints.progress import Progress
from controller.config import Config
from controller.preflight.memory import GIB, Memory, host_memory
from tests.workers.model.cpu_engine import build_engine
from tests.workers.model.tiny import random_sequences, save_tiny_model
from workers.config.roles import OptimizerConfig
from workers.model.checkpoint.checkpoint import RankCopy
from workers.model.losses import Denominators, sft

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

    assert plan_restore(held, []) is None
    plan = plan_restore(held, ranks)
    complete_steps = [step for step in range(1, 5) if is_complete(step)]
    assert (plan.step if plan else None) == max(complete_steps, default=None)
    if plan is not None:
        assert plan.sources.keys() == ranks
        assert all((rank, plan.step) in held[node] for rank, node in plan.sources.items())


@given(st.lists(st.integers(1, 9), unique=True, min_size=1).map(sorted), st.integers(0, 9))
def test_a_holder_has_the_last_copies_up_to_the_restored_step(
    steps: list[int], restored: int
) -> None:
    holder = CopyHolder()
    for step in steps:
        tensors = np.array([step], np.uint8)
        holder.hold("policy", 0, step, RankCopy({}, {}, {}, tensors))
        tensors[:] = 0  # the object store may use its memory again
    latest = steps[-GENERATIONS:]
    assert holder.held() == [(("policy", 0), step) for step in latest]
    holder.drop_after(restored)
    assert holder.held() == [(("policy", 0), step) for step in latest if step <= restored]
    for (role, index), step in holder.held():
        assert holder.read(role, index, step).tensors.tolist() == [step]


def test_no_rank_sends_a_step_before_all_have_sent_the_last() -> None:
    """A holder drops the step before the last for it, which would be the newest that all ranks have."""
    groups = Mock()
    for group in (groups.policy, groups.critic):
        group.node_id.return_value = []
    trained = {"policy": groups.policy, "critic": groups.critic}
    PeerCopies().begin(Mock(trained=trained), Progress(), print)
    calls = [name for name, *_ in groups.method_calls if "node_id" not in name]
    assert calls == [
        *(f"{role}.wait_for_copies" for role in trained),
        *(f"{role}.send_copies" for role in trained),
    ]


@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16"])
def test_host_memory_has_the_bytes_of_a_ranks_copies(
    tmp_path: Path, state_dtype: str
) -> None:
    """A holder's copies of an engine on a CPU, and the next one twice while it is sent."""
    path = save_tiny_model(tmp_path / "model", hidden_size=128, intermediate_size=512)
    optimizer = OptimizerConfig(state_dtype=state_dtype)
    engine = build_engine(path, optimizer=optimizer, dtype="float32")
    sequences = random_sequences(2, seed=0)
    engine.forward_backward(sequences, [(0, 2)], sft, Denominators.of(sequences))
    engine.optimizer_step()
    holder = CopyHolder()
    for step in range(1, 5):
        holder.hold("policy", 0, step, engine.checkpointer.copy({}))
    held_bytes = sum(
        holder.read(*rank, step).tensors.nbytes for rank, step in holder.held()
    )
    copy_bytes = engine.checkpointer.copy({}).tensors.nbytes
    config = Config()
    config.run.peer_copies = 1
    config.policy.optimizer.state_dtype = state_dtype
    sizes = dict.fromkeys(("parameters", "trained"), engine.num_parameters)
    memory = Memory({"policy": {"sizes": sizes}})
    parts = host_memory(config, memory, ranks=config.training_workers)
    predicted_bytes = parts["peer copies"] * GIB
    assert predicted_bytes == pytest.approx(held_bytes + 2 * copy_bytes, rel=0.02)
