"""The kill matrix: what dies x placement x when, in whole runs whose weights travel between GPUs (stand-ins).

A lost engine is replaced while the run goes on. A lost rank costs the steps since the last checkpoint.
"""

import pytest

from tests.controller.kill_matrix import (
    ENGINES,
    RANKS,
    Loss,
    Moment,
    Run,
    at_all_times,
    check_every_step,
    check_got_weights_first,
    check_weights_of_the_step_before,
    compare_losses,
    kill_at,
    restarts,
    score_tokens,
    settings,
)
from tests.controller.stand_ins.gpus import StandInReward
from tests.controller.stand_ins.run import StandInRun, StandIns
from workers.errors import LostError, RolloutError

PLACEMENTS = ("apart", "colocated")
OF_RANKS = at_all_times(
    RANKS, ("update", "send", "gather", "checkpoint"), (1, 2, 3)
) + at_all_times(RANKS, ("log_probs",), (1, 2))
OF_UPDATES = ("pause", "receive", "resume")
OF_SLEEP = ("sleep 2", "wake weights", "wake kv_cache")
OF_ENGINES = {
    "apart": ("generate", *OF_UPDATES),
    "colocated": ("generate", *OF_UPDATES, *OF_SLEEP),
}
ENGINE_EVENTS = [
    (placement, event) for placement, events in OF_ENGINES.items() for event in events
]
REPLACEMENT_EVENTS = [
    (placement, event)
    for placement, events in OF_ENGINES.items()
    for event in ("start", "meet", *events)
]
VALIDATED = ("data.validation=prompts.jsonl", "validation.every=1")


@pytest.fixture
def run(run_on_stand_ins: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(StandInReward, "score", score_tokens)
    return run_on_stand_ins


def compare(
    stand_ins: StandIns, run: Run, overrides: tuple[str, ...], *losses: Loss
) -> StandInRun:
    finished = compare_losses(stand_ins, run, overrides, *losses)
    check_weights_of_the_step_before(finished)
    return finished


@pytest.mark.drawn(4)
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize(("placement", "event"), ENGINE_EVENTS)
def test_an_engine_that_is_lost_is_replaced_and_the_run_goes_on(
    stand_ins: StandIns, run: Run, placement: str, event: str, engine: str, times: int
) -> None:
    moment = (engine, event, times)
    finished = compare(stand_ins, run, settings(placement), (moment, (engine,)))
    assert restarts(finished) == (1, 0)
    check_got_weights_first(stand_ins, f"{engine} restart 1")


@pytest.mark.parametrize("placement", PLACEMENTS)
def test_the_only_engine_is_replaced_in_the_middle_of_a_round(
    stand_ins: StandIns, run: Run, placement: str
) -> None:
    dead = kill_at(stand_ins, ("rollout 0", "generate", 6), "rollout 0")
    ranks = 1 if placement == "colocated" else 2
    only = ("rollout.replicas=1", f"policy.data_parallel={ranks}")
    check_every_step(run(*settings(placement, *only)))
    assert dead == ["rollout 0"]
    assert "generate" in stand_ins.world.ledger.of("rollout 0 restart 1")
    check_got_weights_first(stand_ins, "rollout 0 restart 1")


def test_without_restarts_left_a_lost_engine_ends_the_run(
    stand_ins: StandIns, run: Run
) -> None:
    kill_at(stand_ins, ("rollout 1", "receive", 2), "rollout 1")
    with pytest.raises(
        (RolloutError, LostError), match=r"all of run\.max_restarts=0 are used up"
    ):
        run(*settings("apart", "run.max_restarts=0"))


@pytest.mark.drawn(4)
@pytest.mark.parametrize("moment", OF_RANKS, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_engine_that_dies_while_ranks_work_is_replaced(
    stand_ins: StandIns, run: Run, placement: str, engine: str, moment: Moment
) -> None:
    finished = compare(stand_ins, run, settings(placement), (moment, (engine,)))
    assert restarts(finished) == (1, 0)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize(("placement", "event"), ENGINE_EVENTS)
def test_all_engines_that_die_at_once_are_replaced(
    stand_ins: StandIns, run: Run, placement: str, event: str, times: int
) -> None:
    moment = ("rollout 0", event, times)
    finished = compare(stand_ins, run, settings(placement), (moment, ENGINES))
    assert restarts(finished) == (2, 0)


@pytest.mark.drawn(4, always=["apart-start-rollout 0 restart 1"])
@pytest.mark.parametrize("victim", ["rollout 1", "rollout 0 restart 1"])
@pytest.mark.parametrize(("placement", "event"), REPLACEMENT_EVENTS)
def test_an_engine_that_dies_while_another_is_replaced_is_replaced_too(
    stand_ins: StandIns, run: Run, placement: str, event: str, victim: str
) -> None:
    first = (("rollout 0", "generate", 3), ("rollout 0",))
    second = (("rollout 0 restart 1", event, 1), (victim,))
    finished = compare(stand_ins, run, settings(placement), first, second)
    expected = (2, 0)
    if (event, victim) == ("start", "rollout 0 restart 1"):
        expected = (1, 1)  # it does not come up
    elif (placement, event) == ("apart", "meet"):
        expected = (2, 1)  # rank 0 waits for it
    assert restarts(finished) == expected


@pytest.mark.drawn(3)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(("placement", "event"), REPLACEMENT_EVENTS)
def test_a_rank_that_dies_while_an_engine_is_replaced_costs_the_steps_since_the_checkpoint(
    stand_ins: StandIns, run: Run, placement: str, event: str, rank: str
) -> None:
    first = (("rollout 0", "generate", 3), ("rollout 0",))
    second = (("rollout 0 restart 1", event, 1), (rank,))
    finished = compare(stand_ins, run, settings(placement), first, second)
    assert restarts(finished) == (1, 1)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("times", [1, 3, 6, 10, 14])
@pytest.mark.parametrize("victims", [("rollout 0",), ENGINES, ("policy dp=0",)], ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_loss_in_validation_changes_no_result(
    stand_ins: StandIns, run: Run, placement: str, victims: tuple[str, ...], times: int
) -> None:
    moment = ("rollout 0", "generate", times)
    overrides = settings(placement, *VALIDATED)
    finished = compare(stand_ins, run, overrides, (moment, victims))
    assert sum(restarts(finished)) == len(victims)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("moment", OF_RANKS, ids=str)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_rank_that_is_lost_costs_the_steps_since_the_last_checkpoint(
    stand_ins: StandIns, run: Run, placement: str, moment: Moment
) -> None:
    finished = compare(stand_ins, run, settings(placement), (moment, moment[:1]))
    assert restarts(finished) == (0, 1)


@pytest.mark.drawn(2)
@pytest.mark.parametrize("times", [2, 3, 4])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_rank_that_dies_while_a_checkpoint_is_read_costs_another_restart(
    stand_ins: StandIns, run: Run, placement: str, rank: str, times: int
) -> None:
    losses = [((rank, "update", times), (rank,)), ((rank, "load", 1), (rank,))]
    finished = compare(stand_ins, run, settings(placement), *losses)
    assert restarts(finished) == (0, 2)
