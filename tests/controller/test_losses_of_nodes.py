"""The kill matrix's rows of nodes: all actors of a node die at once, with copies of the ranks in memory of two
nodes, or with checkpoints.
"""

from collections.abc import Sequence

import pytest

from tests.controller.kill_matrix import (
    RANKS,
    STEPS,
    Moment,
    Run,
    at_all_times,
    check_weights_of_the_step_before,
    compare,
    do_at,
    restarts,
    score_tokens,
    settings,
)
from tests.controller.stand_ins.gpus import StandInReward
from tests.controller.stand_ins.local_ray import DRIVERS_NODE
from tests.controller.stand_ins.run import StandInRun, StandIns

NODES = (f"{0:056x}", f"{1:056x}")
"""Ids of nodes, of 28 bytes. The last digit is that of its rank and engine."""
IN_MEMORY = ("run.peer_copies=1", "run.checkpoint_every=0")
ON_DISK = ("run.peer_copies=0", "run.checkpoint_every=1")
MOMENTS = [
    *at_all_times(RANKS, ("update", "send", "gather"), (2, 4)),
    *at_all_times(("policy dp=0",), ("log_probs",), (2,)),
    *at_all_times(("rollout 0",), ("generate", "pause", "receive", "resume"), (3,)),
    *at_all_times(("rollout 1",), ("generate", "receive"), (3, 5)),
]
OF_COPIES = at_all_times(RANKS, ("copy",), (1, 2, 3, 4))
COLOCATED_MOMENTS = at_all_times(
    ("rollout 0",), ("sleep 2", "wake weights", "wake kv_cache"), (2, 4)
)
CASES = [("apart", moment) for moment in MOMENTS]
CASES += [("colocated", moment) for moment in MOMENTS + COLOCATED_MOMENTS]


@pytest.fixture
def run(run_on_stand_ins: Run, stand_ins: StandIns, monkeypatch: pytest.MonkeyPatch) -> Run:
    """Runs on two nodes. Each has a rank and an engine."""

    def node_of(gpus: Sequence[int]) -> str:
        return NODES[gpus[0] % len(NODES)] if gpus else DRIVERS_NODE

    monkeypatch.setattr(StandInReward, "score", score_tokens)
    stand_ins.world.ray.node_of = node_of
    return run_on_stand_ins


def lose(
    stand_ins: StandIns, run: Run, overrides: tuple[str, ...], moment: Moment, *nodes: str
) -> StandInRun:
    dead: list[str] = []

    def lose_nodes() -> None:
        for node in nodes:
            dead.extend(stand_ins.world.ray.lose_node(node))

    finished = compare(
        stand_ins, run, overrides, lambda: do_at(stand_ins, moment, lose_nodes)
    )
    for node in nodes:
        number = node[-1]
        assert {f"policy dp={number}", f"rollout {number}"} <= set(dead)
    check_weights_of_the_step_before(finished)
    assert restarts(finished)[1] == 1
    return finished


@pytest.mark.drawn(5)
@pytest.mark.parametrize("node", NODES, ids=["node 0", "node 1"])
@pytest.mark.parametrize(("placement", "moment"), CASES, ids=str)
@pytest.mark.parametrize("kept", [IN_MEMORY, ON_DISK], ids=["copies", "checkpoints"])
def test_a_node_that_is_lost_costs_the_step_in_progress(
    stand_ins: StandIns,
    run: Run,
    kept: tuple[str, ...],
    placement: str,
    moment: Moment,
    node: str,
) -> None:
    lose(stand_ins, run, settings(placement, *kept), moment, node)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("node", NODES, ids=["node 0", "node 1"])
@pytest.mark.parametrize("moment", OF_COPIES, ids=str)
@pytest.mark.parametrize("placement", ["apart", "colocated"])
def test_a_node_that_is_lost_while_copies_are_made_costs_one_step_more(
    stand_ins: StandIns, run: Run, placement: str, moment: Moment, node: str
) -> None:
    """The newest step that all ranks have in memory is the one before, or this one if the lost rank's copy
    was sent already.
    """
    copying, _, step = moment
    is_sent = copying == "policy dp=1" and node == NODES[0]
    if is_sent and step == STEPS:
        pytest.skip("every step has ended")
    finished = lose(stand_ins, run, settings(placement, *IN_MEMORY), moment, node)
    steps = [line for line in finished.said if "in memory, from copies on" in line]
    newest = step if is_sent else step - 1
    if newest:
        assert [f"step {newest} in memory" in line for line in steps] == [True]


@pytest.mark.drawn(2)
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("placement", ["apart", "colocated"])
@pytest.mark.parametrize("every", [0, 2])
def test_when_all_nodes_are_lost_the_last_checkpoint_is_left_or_the_beginning(
    stand_ins: StandIns, run: Run, placement: str, times: int, every: int
) -> None:
    overrides = settings(placement, *IN_MEMORY, f"run.checkpoint_every={every}")
    finished = lose(stand_ins, run, overrides, ("policy dp=0", "update", times), *NODES)
    assert not any("in memory, from copies on" in line for line in finished.said)
    if every and times > every:
        assert any("step-2" in line for line in finished.said)
