"""The kill matrix of runs that generate ahead: engines sample while ranks compute, and checkpoints hold samples."""

import pytest

from tests.controller.kill_matrix import (
    ENGINES,
    RANKS,
    Loss,
    Moment,
    Run,
    at_all_times,
    compare_losses,
    recorded,
    restarts,
    score_tokens,
    settings,
)
from tests.controller.stand_ins.gpus import StandInReward
from tests.controller.stand_ins.run import StandInRun, StandIns
from tests.controller.test_losses_at_all_moments import OF_RANKS

STALENESS = 2
AHEAD = settings("apart", f"rollout.max_staleness={STALENESS}")
OF_ENGINES = at_all_times(ENGINES, ("generate", "pause", "receive", "resume"), (1, 2, 4))
MAY_DIFFER = ("rollout/", "policy/rollout_mismatch")
"""Weights that sampled a token: a loss changes how far ahead engines are."""


@pytest.fixture
def run(run_on_stand_ins: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(StandInReward, "score", score_tokens)
    return run_on_stand_ins


def compare(stand_ins: StandIns, run: Run, *losses: Loss) -> StandInRun:
    finished = compare_losses(stand_ins, run, AHEAD, *losses, may_differ=MAY_DIFFER)
    for step in recorded(finished)[1:]:
        assert step["step"] - 1 - step["rollout/oldest_weight_version"] <= STALENESS
    return finished


@pytest.mark.drawn(4)
@pytest.mark.parametrize("moment", OF_ENGINES, ids=str)
def test_an_engine_that_is_lost_is_replaced(
    stand_ins: StandIns, run: Run, moment: Moment
) -> None:
    finished = compare(stand_ins, run, (moment, (moment[0],)))
    assert restarts(finished) == (1, 0)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("moment", OF_RANKS, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
def test_an_engine_that_is_lost_while_ranks_work_is_replaced(
    stand_ins: StandIns, run: Run, engine: str, moment: Moment
) -> None:
    finished = compare(stand_ins, run, (moment, (engine,)))
    assert restarts(finished) == (1, 0)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("moment", OF_RANKS + OF_ENGINES[:12], ids=str)
def test_all_engines_that_are_lost_at_once_are_replaced(
    stand_ins: StandIns, run: Run, moment: Moment
) -> None:
    finished = compare(stand_ins, run, (moment, ENGINES))
    assert restarts(finished) == (2, 0)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("moment", OF_RANKS + OF_ENGINES, ids=str)
@pytest.mark.parametrize("victims", [(RANKS[1],), (RANKS[0], ENGINES[1])], ids=str)
def test_a_rank_that_is_lost_or_a_node_costs_the_steps_since_the_checkpoint(
    stand_ins: StandIns, run: Run, victims: tuple[str, ...], moment: Moment
) -> None:
    finished = compare(stand_ins, run, (moment, victims))
    assert restarts(finished)[1] == 1


@pytest.mark.drawn(3)
@pytest.mark.parametrize("victim", [ENGINES[1], f"{ENGINES[0]} restart 1", RANKS[0]])
@pytest.mark.parametrize("event", ["start", "meet", "pause", "receive", "resume"])
def test_a_second_loss_while_an_engine_is_replaced(
    stand_ins: StandIns, run: Run, event: str, victim: str
) -> None:
    first = (("rollout 0", "generate", 7), ("rollout 0",))
    second = ((f"{ENGINES[0]} restart 1", event, 1), (victim,))
    finished = compare(stand_ins, run, first, second)
    restarts_all = (
        victim == RANKS[0]
        or event == "meet"
        or (event, victim) == ("start", f"{ENGINES[0]} restart 1")
    )
    assert restarts(finished)[1] == int(restarts_all)
