"""Whole runs with a range of engines, rollout.replicas=MIN..MAX, on stand-ins of GPUs.

Engines come and go between steps. Each prompt is sampled once, as by any number of engines.
"""

from pathlib import Path

import pytest

from tests.controller.kill_matrix import (
    Run,
    check_got_weights_first,
    clear_record,
    kill_at,
    recorded,
    sampled,
)
from tests.controller.stand_ins.run import StandInRun, StandIns
from workers.errors import RolloutError

STEPS = 6
BASE = (
    "rollout.placement=apart",
    f"run.steps={STEPS}",
    "run.checkpoint_every=1",
    "data.validation=''",
)


@pytest.fixture
def run(run_on_stand_ins: Run) -> Run:
    return run_on_stand_ins


@pytest.fixture
def expected(stand_ins: StandIns, run: Run) -> set[object]:
    """Samples of one engine."""
    run(*BASE, "run.name=fixed", "rollout.replicas=1")
    samples = sampled(stand_ins)
    clear_record(stand_ins)
    return samples


def engines_by_step(finished: StandInRun) -> list[float]:
    """Engines that are up after each step, of a run in which no step is missing or short."""
    steps = recorded(finished)[1:]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["rollout/samples"] for step in steps] == [4.0] * STEPS
    assert [step["rollout/newest_weight_version"] for step in steps] == list(range(STEPS))
    return [step["rollout/engines"] for step in steps]


def test_engines_are_added_up_to_the_maximum_where_the_cluster_has_room(
    stand_ins: StandIns, run: Run, expected: set[object]
) -> None:
    stand_ins.free_gpus += [[7], [8], [9]]
    finished = run(*BASE, "rollout.replicas=1..3")
    engines = engines_by_step(finished)
    assert engines == sorted(engines) and (engines[0], engines[-1]) == (1.0, 3.0)
    assert sampled(stand_ins) == expected
    for engine in ("rollout 1", "rollout 2"):
        check_got_weights_first(stand_ins, engine)
    assert "rollout 3" not in stand_ins.world.ray.actors
    last = finished.outcome.steps[-1]
    assert (last["restarts/engines"], last["restarts/recoveries"]) == (0, 0)
    assert any("3 of 1..3 engines" in line for line in finished.said)


def test_engines_are_added_and_lost_while_samples_are_made_ahead(
    stand_ins: StandIns, run: Run
) -> None:
    stand_ins.free_gpus += [[7]]
    dead = kill_at(stand_ins, ("rollout 0", "generate", 20), "rollout 0")
    finished = run(*BASE, "rollout.replicas=1..2", "rollout.max_staleness=1")
    assert dead == ["rollout 0"]
    steps = recorded(finished)[1:]
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert [step["rollout/samples"] for step in steps] == [4.0] * STEPS
    engines = [step["rollout/engines"] for step in steps]
    assert max(engines) == 2.0 and engines[-1] == 1.0
    assert max(step["rollout/staleness_max"] for step in steps) <= 1.0


def test_a_loop_of_ones_own_gets_engines_between_its_updates(
    stand_ins: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("controller.engines.elastic_pool.POLL_SECONDS", 0.0)
    stand_ins.free_gpus += [[7]]
    overrides = [f"run.dir={tmp_path}", *BASE, "rollout.replicas=1..2"]
    with stand_ins.open(overrides) as own:
        for _ in range(3):
            samples = own.sample(own.prompts(2), n=2).result()
            assert len(samples.batch) == 4
            own.publish().result()
    check_got_weights_first(stand_ins, "rollout 1")


def test_without_room_a_run_keeps_its_minimum(
    stand_ins: StandIns, run: Run, expected: set[object]
) -> None:
    finished = run(*BASE, "rollout.replicas=1..3")
    assert engines_by_step(finished) == [1.0] * STEPS
    assert sampled(stand_ins) == expected


@pytest.mark.parametrize("moment", ["generate", "pause", "receive", "resume"])
def test_a_lost_engine_whose_node_is_gone_leaves_the_run_with_fewer(
    stand_ins: StandIns, run: Run, expected: set[object], moment: str
) -> None:
    stand_ins.free_gpus += [[7]]
    dead = kill_at(
        stand_ins, ("rollout 0", moment, 9 if moment == "generate" else 5), "rollout 0"
    )
    finished = run(*BASE, "rollout.replicas=1..2")
    assert dead == ["rollout 0"]
    engines = engines_by_step(finished)
    assert max(engines) == 2.0 and engines[-1] == 1.0
    assert sampled(stand_ins) == expected
    assert "rollout 0 restart 1" not in stand_ins.world.ray.actors
    last = finished.outcome.steps[-1]
    assert (last["restarts/engines"], last["restarts/recoveries"]) == (0, 0)


def test_a_lost_engine_comes_back_where_its_room_is_still_there(
    stand_ins: StandIns, run: Run, expected: set[object]
) -> None:
    stand_ins.free_gpus += [[7]]
    dead = kill_at(stand_ins, ("rollout 1", "generate", 1), "rollout 1")
    finished = run(*BASE, "rollout.replicas=1..2")
    assert dead == ["rollout 1"]
    assert engines_by_step(finished)[-1] == 2.0
    assert sampled(stand_ins) == expected
    check_got_weights_first(stand_ins, "rollout 1 restart 1")
    assert finished.outcome.steps[-1]["restarts/engines"] == 1


def test_an_engine_that_cannot_start_is_given_up_and_the_run_goes_on(
    stand_ins: StandIns, run: Run, expected: set[object]
) -> None:
    stand_ins.free_gpus += [[7]]
    dead = []

    def trouble(name: str, moment: str) -> None:
        if name.startswith("rollout 1") and moment == "start":
            dead.append(name)
            stand_ins.world.ray.actors[name].die()

    stand_ins.world.trouble = trouble
    finished = run(*BASE, "rollout.replicas=1..2")
    assert dead == ["rollout 1", "rollout 1 restart 1"]
    assert engines_by_step(finished) == [1.0] * STEPS
    assert sampled(stand_ins) == expected
    assert any("it is not replaced" in line for line in finished.said)


def test_without_restarts_left_a_run_goes_on_with_its_minimum(
    stand_ins: StandIns, run: Run, expected: set[object]
) -> None:
    stand_ins.free_gpus += [[7]]
    kill_at(stand_ins, ("rollout 1", "generate", 1), "rollout 1")
    finished = run(*BASE, "rollout.replicas=1..2", "run.max_restarts=0")
    assert engines_by_step(finished)[-1] == 1.0
    assert sampled(stand_ins) == expected


def test_without_restarts_left_a_run_ends_below_its_minimum(
    stand_ins: StandIns, run: Run
) -> None:
    kill_at(stand_ins, ("rollout 0", "generate", 3), "rollout 0")
    with pytest.raises(RolloutError, match=r"run\.max_restarts=0"):
        run(*BASE, "rollout.replicas=1..1", "run.max_restarts=0")
