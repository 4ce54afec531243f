"""Who has the GPUs when, in whole runs on stand-ins: no two owners at one time, and in the order that a run
needs.
"""

from datetime import timedelta

import pytest

from tests.controller.kill_matrix import Run, do_at
from tests.controller.stand_ins.local_ray import NeverReturnsError
from tests.controller.stand_ins.run import StandInRun, StandIns
from workers.errors import LostError

ROLES = {
    "policy": (),
    "reference": ("algorithm.loss.kl_coefficient=0.1",),
    "adapters": ("algorithm.loss.kl_coefficient=0.1", "model.lora.rank=2"),
    "critic": (
        "algorithm.advantage=gae",
        "algorithm.gae.whiten=false",
        "batch.mini_batches=2",
    ),
    "warm-up": (
        "algorithm.advantage=gae",
        "algorithm.gae.whiten=false",
        "critic.warmup_steps=1",
    ),
    "reward model": ("reward.model.path=judge", "algorithm.loss.kl_coefficient=0.1"),
}
ENGINES = {
    "an engine a GPU": ("rollout.replicas=2",),
    "an engine over two GPUs": ("rollout.replicas=1", "rollout.tensor_parallel=2"),
}
CHECKPOINTS = ("run.checkpoint_every=1", "run.save_every=1", "validation.every=1")


@pytest.fixture
def run(run_on_stand_ins: Run) -> Run:
    return run_on_stand_ins


@pytest.mark.drawn(8)
@pytest.mark.parametrize("placement", ["colocated", "apart"])
@pytest.mark.parametrize("engines", ENGINES.values(), ids=ENGINES)
@pytest.mark.parametrize("roles", ROLES.values(), ids=ROLES)
def test_no_two_owners_have_a_gpu_at_one_time(
    run: Run, roles: tuple[str, ...], engines: tuple[str, ...], placement: str
) -> None:
    finished = run(f"rollout.placement={placement}", *engines, *roles, *CHECKPOINTS)
    assert finished.outcome.last_step == 2
    again = run(
        f"rollout.placement={placement}", *engines, *roles, "run.resume=auto", "run.steps=3"
    )
    assert again.outcome.last_step == 3 and len(again.outcome.steps) == 1


COLOCATED = ("rollout.placement=colocated", "rollout.replicas=2")
GENERATION = ["generate"]
TRAINING = ["log_probs", "free", "update", "free"]
SENDING = [
    "wake weights",
    "send",
    "pause",
    "gather",
    "receive",
    "resume",
    "free",
    "wake kv_cache",
]


def steps_of(run: StandInRun) -> list[list[str]]:
    """What policy rank 0 and engine 0 did from the first generation on, cut where a generation begins."""
    steps: list[list[str]] = []
    for what in run.world.ledger.of("policy dp=0", "rollout 0"):
        if what == "generate":
            steps.append([])
        if steps:
            steps[-1].append(what)
    return steps


def test_a_step_is_generation_sleep_passes_and_new_weights_before_the_kv_cache(
    run: Run,
) -> None:
    finished = run(*COLOCATED, "batch.mini_batches=2", "data.validation=''")
    ended = ["sleep 2", "save", "free"]
    first, second = steps_of(finished)
    assert first == [*GENERATION, "sleep 2", *TRAINING, *SENDING]
    assert second == [*first, *ended]


def test_every_epoch_makes_its_optimiser_steps_of_policy_and_critic(run: Run) -> None:
    epochs = ("batch.epochs=3", "batch.mini_batches=2")
    finished = run(*COLOCATED, *ROLES["warm-up"], *epochs)
    engines = [
        finished.world.ray.actors[f"{role} dp=0"].instance.engine
        for role in ("policy", "critic")
    ]
    # The policy rests in the first of two steps.
    assert [engine.steps for engine in engines] == [1 * 3 * 2, 2 * 3 * 2]
    assert [engine.total_steps for engine in engines] == [1 * 3 * 2, 2 * 3 * 2]


def test_a_run_begins_with_engines_that_start_alone_and_sleep_until_the_policy_sends_its_weights(
    run: Run,
) -> None:
    finished = run(*COLOCATED, "data.validation=''")
    events = finished.world.ledger.of("policy dp=0", "rollout 0")
    wake, *sending = SENDING
    # Ranks and engines meet once.
    start = ["start", "sleep 2", "build", "free", wake, "connect", "meet"]
    assert events[: events.index("generate")] == start + sending


def test_engines_of_gpus_of_their_own_never_sleep(run: Run) -> None:
    finished = run("rollout.placement=apart", "rollout.replicas=2", *CHECKPOINTS)
    events = finished.world.ledger.of("rollout")
    assert {"receive", "generate"} <= set(events) and not {
        "sleep 2",
        "wake weights",
        "wake kv_cache",
    } & set(events)


def test_in_a_warm_up_of_the_critic_engines_wake_with_the_weights_that_they_had(
    run: Run,
) -> None:
    finished = run(*COLOCATED, *ROLES["warm-up"], "data.validation=''")
    assert [step["rollout/weight_version"] for step in finished.outcome.steps] == [0.0, 1.0]
    assert [step["rollout/newest_weight_version"] for step in finished.outcome.steps] == [
        0.0,
        0.0,
    ]


@pytest.mark.parametrize(("what", "times"), [("generate", 4), ("receive", 2)])
def test_with_deltas_an_engine_on_a_gpu_is_replaced_alone(
    stand_ins: StandIns, run: Run, what: str, times: int
) -> None:
    """The new one begins with whole weights, those of the run's start, and deltas."""
    world = stand_ins.world

    def die() -> None:
        engine = world.ray.actors["rollout 1"]
        engine.die()
        world.ledger.give(engine.gpus, "rollout 1", "weights", "kv_cache")

    do_at(stand_ins, ("rollout 1", what, times), die)
    deltas = (
        "rollout.weight_sync=delta",
        "rollout.placement=apart",
        "rollout.replicas=2",
        "run.steps=4",
    )
    finished = run(*deltas, "data.validation=''")
    last = finished.outcome.steps[-1]
    assert (
        last["restarts/engines"],
        last["restarts/recoveries"],
        last["rollout/weights_whole"],
    ) == (1, 0, 0)
    assert {"receive", "generate"} <= set(world.ledger.of("rollout 1 restart 1"))


def test_a_transfer_in_which_nobody_dies_and_nothing_moves_has_a_time_limit(
    stand_ins: StandIns, run: Run
) -> None:
    def hang() -> None:
        raise NeverReturnsError

    do_at(stand_ins, ("policy dp=0", "send", 1), hang)
    limit = ("resources.collective_timeout_s=0.1", "run.max_restarts=0")
    with pytest.raises(
        LostError,
        match=r"send_weights did not finish within resources\.collective_timeout_s=0\.1",
    ):
        run(*COLOCATED, *limit)


def test_ranks_wait_for_each_other_as_long_as_the_configuration_says(
    stand_ins: StandIns, run: Run
) -> None:
    run(*COLOCATED, "resources.collective_timeout_s=77", "data.validation=''")
    assert set(stand_ins.collective_timeouts) == {timedelta(seconds=77)}
