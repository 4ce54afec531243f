"""The kill matrix: what dies x placement x when, in whole runs whose weights travel between GPUs (stand-ins).

A lost engine is replaced while the run goes on. A lost rank costs the steps since the last checkpoint.
"""

import json
from collections.abc import Callable
from typing import Any

import pytest

from tests.controller.stand_ins.run import StandInRun, StandIns
from workers.errors import LostError

STEPS = 4
Run = Callable[..., StandInRun]
ENGINE_MOMENTS = {
    "colocated": (
        "generate",
        "pause",
        "receive",
        "resume",
        "sleep 2",
        "wake weights",
        "wake kv_cache",
    ),
    "apart": ("generate", "pause", "receive", "resume"),
}
RANK_MOMENTS = ("log_probs", "update", "send", "gather")
ENGINE_CASES = [
    (placement, engine, moment, times)
    for placement, moments in ENGINE_MOMENTS.items()
    for engine in ("rollout 0", "rollout 1")
    for moment in moments
    for times in (1, 2, 3)
]
RANK_CASES = [
    (placement, rank, moment, times)
    for placement in ENGINE_MOMENTS
    for rank in ("policy dp=0", "policy dp=1")
    for moment in RANK_MOMENTS
    for times in ((2,) if moment == "log_probs" else (2, 3))
]


@pytest.fixture
def run(run_on_stand_ins: Run) -> Run:
    return run_on_stand_ins


def kill_once(
    stand_ins: StandIns, actor: str, moment: str, times: int, *others: str
) -> list[str]:
    """Let the actor, and others with it, die when it does this for the `times`-th time. Returns the dead."""
    dead: list[str] = []
    counts = [0]

    def trouble(name: str, moment_now: str) -> None:
        if (name, moment_now) == (actor, moment):
            counts[0] += 1
            if counts[0] == times:
                for victim in (actor, *others):
                    dead.append(victim)
                    stand_ins.world.ray.actors[victim].die()

    stand_ins.world.trouble = trouble
    return dead


def settings(placement: str, *more: str) -> tuple[str, ...]:
    return (
        f"rollout.placement={placement}",
        "rollout.replicas=2",
        f"run.steps={STEPS}",
        "run.checkpoint_every=1",
        "data.validation=''",
        *more,
    )


def recorded(finished: StandInRun) -> list[dict[str, Any]]:
    return [
        json.loads(line) for line in (finished.config.run_folder / "metrics.jsonl").open()
    ]


def check_every_step(finished: StandInRun) -> None:
    """Every step is there once, with all of its samples, by weights of the update before."""
    steps = recorded(finished)
    assert [step["step"] for step in steps] == list(range(STEPS + 1))
    assert [step["rollout/samples"] for step in steps[1:]] == [4.0] * STEPS
    assert [step["rollout/newest_weight_version"] for step in steps[1:]] == [
        0.0,
        1.0,
        2.0,
        3.0,
    ]
    assert [step["rollout/weight_version"] for step in steps[1:]] == [1.0, 2.0, 3.0, 4.0]


def sampled(stand_ins: StandIns) -> set[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Prompts and responses, which follow from their seeds."""
    return {(tuple(prompt), tuple(tokens)) for _, prompt, tokens in stand_ins.world.turns}


def check_replaced(
    stand_ins: StandIns, run: Run, case: tuple[str, str, str, int], *more: str
) -> None:
    placement, engine, moment, times = case
    run(*settings(placement, "run.name=undisturbed", *more))
    undisturbed = sampled(stand_ins)
    stand_ins.world.turns.clear()
    stand_ins.world.ledger.events.clear()
    dead = kill_once(stand_ins, engine, moment, times)
    finished = run(*settings(placement, *more))
    assert dead == [engine], "nothing died"
    check_every_step(finished)
    assert sampled(stand_ins) == undisturbed
    last = finished.outcome.steps[-1]
    assert (last["restarts/engines"], last["restarts/recoveries"]) == (1, 0)
    events = stand_ins.world.ledger.of(f"{engine} restart 1")
    assert events[0] == "start"
    if "generate" in events:  # not before it had weights
        assert events.index("meet") < events.index("receive") < events.index("generate")


@pytest.mark.drawn(4)
@pytest.mark.parametrize("case", ENGINE_CASES, ids=str)
def test_an_engine_that_is_lost_is_replaced_and_the_run_goes_on(
    stand_ins: StandIns, run: Run, case: tuple[str, str, str, int]
) -> None:
    check_replaced(stand_ins, run, case)


@pytest.mark.parametrize("placement", ENGINE_MOMENTS)
def test_the_only_engine_is_replaced_in_the_middle_of_a_round(
    stand_ins: StandIns, run: Run, placement: str
) -> None:
    dead = kill_once(stand_ins, "rollout 0", "generate", 6)
    only = (
        "policy.data_parallel=1" if placement == "colocated" else "policy.data_parallel=2"
    )
    finished = run(*settings(placement, "rollout.replicas=1", only))
    assert dead == ["rollout 0"]
    check_every_step(finished)
    assert {"receive", "generate"} <= set(stand_ins.world.ledger.of("rollout 0 restart 1"))


@pytest.mark.drawn(3)
@pytest.mark.parametrize("case", RANK_CASES, ids=str)
def test_a_rank_that_is_lost_costs_the_steps_since_the_last_checkpoint(
    stand_ins: StandIns, run: Run, case: tuple[str, str, str, int]
) -> None:
    placement, rank, moment, times = case
    dead = kill_once(stand_ins, rank, moment, times)
    finished = run(*settings(placement))
    assert dead == [rank], "nothing died"
    check_every_step(finished)
    assert any("restarting all roles" in line for line in finished.said)


@pytest.mark.parametrize("placement", ENGINE_MOMENTS)
@pytest.mark.parametrize(
    ("actor", "moment"), [("rollout 1", "receive"), ("policy dp=1", "update")]
)
def test_a_node_that_is_lost_costs_the_steps_since_the_last_checkpoint(
    stand_ins: StandIns, run: Run, placement: str, actor: str, moment: str
) -> None:
    """A rank and an engine die at one time."""
    (other,) = {"rollout 1", "policy dp=1"} - {actor}
    dead = kill_once(stand_ins, actor, moment, 2, other)
    finished = run(*settings(placement))
    assert dead == [actor, other]
    check_every_step(finished)
    assert any("restarting all roles" in line for line in finished.said)


@pytest.mark.parametrize("placement", ENGINE_MOMENTS)
def test_a_replacement_that_does_not_come_up_costs_the_steps_since_the_last_checkpoint(
    stand_ins: StandIns, run: Run, placement: str
) -> None:
    dead = kill_once(stand_ins, "rollout 1", "generate", 3)
    kills_engine = stand_ins.world.trouble

    def trouble(name: str, moment: str) -> None:
        kills_engine(name, moment)
        if (name, moment) == ("rollout 1 restart 1", "start"):
            dead.append(name)
            stand_ins.world.ray.actors[name].die()

    stand_ins.world.trouble = trouble
    finished = run(*settings(placement))
    assert dead == ["rollout 1", "rollout 1 restart 1"]
    check_every_step(finished)
    assert any("it was to replace a lost engine" in line for line in finished.said)


def test_without_restarts_left_a_lost_engine_ends_the_run(
    stand_ins: StandIns, run: Run
) -> None:
    from workers.errors import RolloutError

    kill_once(stand_ins, "rollout 1", "receive", 2)
    with pytest.raises(
        (RolloutError, LostError), match=r"all of run\.max_restarts=0 are used up"
    ):
        run(*settings("apart", "run.max_restarts=0"))
