"""The kill matrix's other rows: engines while ranks work, several at once, one after another, in validation and
beside a checkpoint.
"""

from collections.abc import Callable

import pytest

from tests.controller.kill_matrix import (
    Moment,
    at_all_times,
    check_every_step,
    check_weights_of_the_step_before,
    clear_record,
    differences,
    kill_at,
    restarts,
    sampled,
    score_tokens,
    settings,
)
from tests.controller.stand_ins.gpus import StandInReward
from tests.controller.stand_ins.run import StandInRun, StandIns

Run = Callable[..., StandInRun]
PLACEMENTS = ("apart", "colocated")
ENGINES = ("rollout 0", "rollout 1")
RANKS = ("policy dp=0", "policy dp=1")
WHILE_RANKS_WORK = at_all_times(
    RANKS, ("log_probs", "update", "send", "gather", "checkpoint"), (1, 2)
)
OF_ENGINES = {
    "apart": ("generate", "pause", "receive", "resume"),
    "colocated": (
        "generate",
        "pause",
        "receive",
        "resume",
        "sleep 2",
        "wake weights",
        "wake kv_cache",
    ),
}
OF_REPLACEMENTS = {
    "apart": ("start", "meet", "pause", "receive", "resume", "generate"),
    "colocated": (
        "start",
        "sleep 2",
        "wake weights",
        "meet",
        "pause",
        "receive",
        "resume",
        "wake kv_cache",
        "generate",
    ),
}
VALIDATED = ("data.validation=prompts.jsonl", "validation.every=1")


@pytest.fixture
def run(run_on_stand_ins: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(StandInReward, "score", score_tokens)
    return run_on_stand_ins


def compare(
    stand_ins: StandIns,
    run: Run,
    overrides: tuple[str, ...],
    *losses: tuple[Moment, tuple[str, ...]],
) -> tuple[StandInRun, list[str]]:
    """Run without losses, and with them. Both must have the same steps. Returns the second run and the dead."""
    undisturbed = run(*overrides, "run.name=undisturbed")
    samples = sampled(stand_ins)
    clear_record(stand_ins)
    dead = [kill_at(stand_ins, moment, *victims) for moment, victims in losses]
    finished = run(*overrides)
    assert dead == [list(victims) for _, victims in losses], "somebody did not die"
    check_every_step(finished)
    check_weights_of_the_step_before(finished)
    assert sampled(stand_ins) == samples
    assert differences(finished, undisturbed) == []
    return finished, [name for names in dead for name in names]


@pytest.mark.drawn(4)
@pytest.mark.parametrize("moment", WHILE_RANKS_WORK, ids=str)
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_an_engine_that_dies_while_ranks_work_is_replaced(
    stand_ins: StandIns, run: Run, placement: str, engine: str, moment: Moment
) -> None:
    finished, _ = compare(stand_ins, run, settings(placement), (moment, (engine,)))
    assert restarts(finished) == (1, 0)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("times", [2, 3])
@pytest.mark.parametrize(
    ("placement", "event"),
    [(placement, event) for placement, events in OF_ENGINES.items() for event in events],
)
def test_all_engines_that_die_at_once_are_replaced(
    stand_ins: StandIns, run: Run, placement: str, event: str, times: int
) -> None:
    moment = ("rollout 0", event, times)
    finished, _ = compare(stand_ins, run, settings(placement), (moment, ENGINES))
    assert restarts(finished) == (2, 0)


@pytest.mark.drawn(4)
@pytest.mark.parametrize("victim", ["rollout 1", "rollout 0 restart 1"])
@pytest.mark.parametrize(
    ("placement", "event"),
    [
        (placement, event)
        for placement, events in OF_REPLACEMENTS.items()
        for event in events
    ],
)
def test_an_engine_that_dies_while_another_is_replaced_is_replaced_too(
    stand_ins: StandIns, run: Run, placement: str, event: str, victim: str
) -> None:
    first = (("rollout 0", "generate", 3), ("rollout 0",))
    second = (("rollout 0 restart 1", event, 1), (victim,))
    finished, _ = compare(stand_ins, run, settings(placement), first, second)
    expected = (2, 0)
    if (event, victim) == ("start", "rollout 0 restart 1"):
        expected = (1, 1)  # it does not come up
    elif (placement, event) == ("apart", "meet"):
        expected = (2, 1)  # rank 0 waits for it
    assert restarts(finished) == expected


@pytest.mark.drawn(3)
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize(
    ("placement", "event"),
    [
        (placement, event)
        for placement, events in OF_REPLACEMENTS.items()
        for event in events
    ],
)
def test_a_rank_that_dies_while_an_engine_is_replaced_costs_the_steps_since_the_checkpoint(
    stand_ins: StandIns, run: Run, placement: str, event: str, rank: str
) -> None:
    first = (("rollout 0", "generate", 3), ("rollout 0",))
    second = (("rollout 0 restart 1", event, 1), (rank,))
    finished, _ = compare(stand_ins, run, settings(placement), first, second)
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
    finished, _ = compare(stand_ins, run, overrides, (moment, victims))
    assert sum(restarts(finished)) == len(victims)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("times", [1, 2, 3])
@pytest.mark.parametrize("event", ["checkpoint", "load"])
@pytest.mark.parametrize("rank", RANKS)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_rank_that_dies_while_a_checkpoint_is_written_or_read_costs_a_restart(
    stand_ins: StandIns, run: Run, placement: str, rank: str, event: str, times: int
) -> None:
    losses = [((rank, "checkpoint", times), (rank,))]
    if event == "load":
        losses = [((rank, "update", times + 1), (rank,)), ((rank, "load", 1), (rank,))]
    finished, dead = compare(stand_ins, run, settings(placement), *losses)
    assert restarts(finished) == (0, len(dead))
