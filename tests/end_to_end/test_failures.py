"""What dies in a run costs time and nothing else: every sample comes once, and every step is the undisturbed
run's.
"""

import pytest

from tests.end_to_end import faults
from tests.end_to_end.faults import (
    Fault,
    RunWithFaults,
    differences,
    run_with,
    without_validation,
)
from tests.end_to_end.processes import living
from tests.json_lines import read_lines

TWO_ENGINES = (
    "rollout.replicas=2",
    "rollout.threads=1",
    "rollout.sampling.max_new_tokens=48",
    "policy.data_parallel=1",
)
OF_PROCESSES = ("rollout.tensor_parallel=2",)
LEARNING = (
    "policy.optimizer.learning_rate=1e-3",
    "batch.mini_batches=2",
    "tracking.tensorboard=false",
)
pytestmark = pytest.mark.soak


def overrides(settings: list[str], name: str, *more: str) -> list[str]:
    return [*without_validation(settings), *LEARNING, f"run.name={name}", *more]


@pytest.fixture(scope="module")
def undisturbed(ray_session, settings: list[str]) -> RunWithFaults:
    return run_with(overrides(settings, "undisturbed", *TWO_ENGINES), {})


@pytest.fixture(scope="module")
def undisturbed_apart(ray_session, settings: list[str]) -> RunWithFaults:
    """Each engine has processes of its own."""
    return run_with(
        overrides(settings, "undisturbed-apart", *TWO_ENGINES, *OF_PROCESSES), {}
    )


@pytest.mark.parametrize("what", [faults.kill_actor, faults.hang_actor])
def test_an_actor_killed_or_hung_costs_no_sample_and_leaves_no_process(
    undisturbed: RunWithFaults, settings: list[str], what: Fault
) -> None:
    check_an_engine_with_a_fault(what, undisturbed, settings)


@pytest.mark.parametrize("what", [faults.kill_engine, faults.hang_engine])
def test_an_engine_killed_or_hung_below_its_actor_costs_no_sample_and_leaves_no_process(
    undisturbed_apart: RunWithFaults, settings: list[str], what: Fault
) -> None:
    check_an_engine_with_a_fault(what, undisturbed_apart, settings, *OF_PROCESSES)


def check_an_engine_with_a_fault(
    what: Fault, undisturbed: RunWithFaults, settings: list[str], *more: str
) -> None:
    pids: list[int] = []

    def fail_and_note(run) -> None:
        pids.extend(faults.engine_pids(run))
        what(run)

    hung = "rollout.hang_timeout_s=5"
    run = run_with(
        overrides(settings, what.__name__, *TWO_ENGINES, hung, *more), {2: fail_and_note}
    )
    assert run.last["restarts/engines"] == 1, run.said
    assert differences(run, undisturbed) == []
    assert living(pids) == []


def test_with_a_single_engine_the_round_waits_for_the_one_in_its_place(
    undisturbed: RunWithFaults, settings: list[str]
) -> None:
    single = [*TWO_ENGINES, "rollout.replicas=1"]
    run = run_with(
        overrides(settings, "single", *single), {2: faults.kill_actor, 3: faults.kill_actor}
    )
    assert run.last["restarts/engines"] == 2
    assert differences(run, undisturbed) == []


RANKS = ("policy.data_parallel=2", "run.checkpoint_every=2", "run.steps=4")
SETTINGS = {
    "reference": (*RANKS, "algorithm.loss.kl_coefficient=0.1"),
    "critic": (*RANKS, "algorithm.advantage=gae", "critic.optimizer.learning_rate=1e-3"),
}


@pytest.fixture(scope="module")
def usual(ray_session, settings: list[str]) -> dict[str, RunWithFaults]:
    return {
        name: run_with(overrides(settings, f"usual-{name}", *more), {})
        for name, more in SETTINGS.items()
    }


@pytest.mark.parametrize(
    ("role", "before", "name"),
    [
        ("policy", "step", "reference"),
        ("policy", "send_weights", "reference"),
        ("reference", "with_reference_log_probs", "reference"),
        ("critic", "update_critic", "critic"),
    ],
)
def test_a_rank_killed_repeats_the_steps_since_the_last_checkpoint(
    usual: dict[str, RunWithFaults], settings: list[str], role: str, before: str, name: str
) -> None:
    """It is struck in step 4, and there is a checkpoint of step 2."""
    given = overrides(settings, f"kill-{role}-{before}", *SETTINGS[name])
    run = run_with(given, {4: faults.kill_rank(role)}, before=before)
    assert run.last["restarts/recoveries"] == 1
    assert any(
        "was lost in" in text and "restarting all roles" in text for text in run.said
    ), run.said
    assert any("going on from" in text and "step-2" in text for text in run.said), run.said
    assert len(run.outcome.steps) == 2  # steps 3 and 4
    assert differences(run, usual[name]) == []
    lines = read_lines(run.config.run_folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]


IN_MEMORY = (*SETTINGS["critic"], "run.checkpoint_every=0", "run.peer_copies=1")


@pytest.mark.parametrize("role", ["policy", "critic"])
def test_a_rank_killed_without_a_checkpoint_continues_from_memory(
    ray_session, settings: list[str], role: str
) -> None:
    """It is struck in step 4. The model is bit by bit the undisturbed run's."""
    usual = run_with(overrides(settings, f"usual-memory-{role}", *IN_MEMORY), {})
    struck = overrides(settings, f"kill-memory-{role}", *IN_MEMORY)
    run = run_with(struck, {4: faults.kill_rank(role)})
    assert run.last["restarts/recoveries"] == 1
    assert any("going on from step 3 in memory" in text for text in run.said), run.said
    assert len(run.outcome.steps) == 1  # step 4
    assert not (run.config.run_folder / "checkpoints").exists()
    assert differences(run, usual) == []
    for name in ("model", "critic"):
        file = f"{name}/model.safetensors"
        assert (run.config.run_folder / file).read_bytes() == (
            usual.config.run_folder / file
        ).read_bytes()
    lines = read_lines(run.config.run_folder / "metrics.jsonl")
    assert [line["step"] for line in lines] == [0, 1, 2, 3, 4]
