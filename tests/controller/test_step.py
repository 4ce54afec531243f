"""The rules of a step, one by one: the real trainer over roles that answer at once (`stand_ins.roles`)."""

from collections.abc import Callable
from typing import Any

import numba
import pytest

from balancing import Plan
from ballast.pages.show import main as show
from controller import step as parts
from controller.checkpoints.progress import Progress, checkpoints_at
from controller.training_loop import RunView, as_metric, takes_run
from tests.controller.observability.recorded_sessions import FORKED
from tests.controller.stand_ins.roles import LocalRun, Method
from tests.json_lines import read_lines
from tests.refusals import refused
from workers.batch.score import Score
from workers.errors import MismatchError

Run = Callable[..., LocalRun]
# sampler and trainer differ: no pass is added to compare them
UNPROVEN = "rollout.engine={quantization: fp8}"
VALIDATION = ("data.validation=held_out.jsonl", "validation.keep_best=reward")


def tokens_of_updates(run: LocalRun, name: str) -> list[str]:
    """Name of the place where a token column of every update of the policy was made."""
    return [
        batch.tokens[name][0][1] if name in batch.tokens else ""
        for batch, _ in run.policy.updates
    ]


# Old log-probs


def test_the_first_steps_compare_sampler_and_trainer_before_they_update(
    local_run: Run,
) -> None:
    found = local_run("run.steps=4")
    found.fit()
    proof = ["policy.log_probs", "policy.update"]
    assert found.of("policy.log_probs", "policy.update") == [
        *proof,
        *proof,
        "policy.update",
        "policy.update",
    ]
    assert tokens_of_updates(found, "old_log_probs") == [""] * 4


@pytest.mark.parametrize(
    ("overrides", "passes", "column", "place"),
    [
        ((), [], "old_log_probs", ""),  # the only optimiser step makes them itself
        (
            ("batch.mini_batches=2",),
            ["policy.log_probs"],
            "old_log_probs",
            "policy log_probs",
        ),
        (("batch.epochs=2",), ["policy.log_probs"], "old_log_probs", "policy log_probs"),
        (("rollout.max_staleness=1",), [], "old_log_probs", "rollout_log_probs"),
        (
            ("algorithm.loss.old_entropies=true",),
            ["policy.log_probs_and_entropies"],
            "old_entropies",
            "policy entropies",
        ),
    ],
)
def test_a_pass_before_the_update_makes_old_log_probs_where_it_must(
    local_run: Run, overrides: tuple[str, ...], passes: list[str], column: str, place: str
) -> None:
    found = local_run(UNPROVEN, "run.steps=1", *overrides)
    found.fit()
    assert found.of("policy.log_probs") == passes
    assert set(tokens_of_updates(found, column)) == {place}


@pytest.mark.parametrize(
    ("overrides", "passes"),
    [((), "reference.log_probs"), (("model.lora.rank=2",), "policy.reference_log_probs")],
)
def test_a_kl_reads_the_reference_or_the_policy_without_adapters(
    local_run: Run, overrides: tuple[str, ...], passes: str
) -> None:
    found = local_run(
        UNPROVEN, "algorithm.loss.kl_coefficient=0.1", "run.steps=1", *overrides
    )
    found.fit()
    assert found.of("reference", "policy.reference") == [passes]
    assert tokens_of_updates(found, "reference_log_probs") == [
        f"{passes.split('.')[0]} log_probs"
    ]


# Mismatch of sampler and trainer


def test_a_mismatch_at_equal_weights_stops_the_run_before_the_update(
    local_run: Run,
) -> None:
    found = local_run("run.checkpoint_every=1")
    found.policy.mismatch = 0.1
    with refused("step 1: log-probs of engines and trainer differ by 0.1", MismatchError):
        found.fit()
    assert (found.policy.updates, checkpoints(found)) == ([], [])


def differing(
    run: LocalRun, update_weights: Callable[[None, int], None]
) -> Callable[[None, int], None]:
    """From the first weights of an update on, sampler and trainer differ."""

    def update(weights: None, version: int) -> None:
        update_weights(weights, version)
        run.policy.mismatch = 0.1 if version else 0.0

    return update


def test_a_mismatch_of_an_update_stops_the_run_before_its_weights_are_sent(
    local_run: Run,
) -> None:
    found = local_run(UNPROVEN, "policy.max_mismatch=0.5")
    found.policy.mismatch = 0.6
    with refused("above policy.max_mismatch=0.5", MismatchError):
        found.fit()
    assert found.of("weights") == ["weights 0"]


def test_the_first_changed_weights_are_proved_though_steps_train_on_older_samples(
    local_run: Run,
) -> None:
    found = local_run("rollout.max_staleness=2")
    found.engines.update_weights = differing(found, found.engines.update_weights)
    with refused("at the first weights that an update has changed", MismatchError):
        found.fit()
    assert len(found.policy.updates) == 1


# Critic


def test_in_its_warm_up_the_critic_learns_alone_and_weights_stay(local_run: Run) -> None:
    found = local_run("algorithm.advantage=gae", "critic.warmup_steps=2", UNPROVEN)
    outcome = found.fit()
    updates = found.of("critic.update", "policy.update")
    assert updates == ["critic.update", "critic.update", "critic.update", "policy.update"]
    assert found.of("weights") == ["weights 0", "weights 1"]
    assert [step["rollout/weight_version"] for step in outcome.steps] == [0, 0, 1]
    # A critic makes the advantages.
    assert "rollout/groups_without_signal" not in outcome.steps[0]
    assert found.of("policy.save", "critic.save") == [
        "policy.save model",
        "critic.save critic",
    ]


def test_a_step_of_ppo_is_in_order(local_run: Run) -> None:
    found = local_run(
        "algorithm.advantage=gae",
        "algorithm.loss.kl_coefficient=0.1",
        "batch.mini_batches=2",
        "run.steps=1",
    )
    found.fit()
    begin, end = found.log.index("generate"), found.log.index("weights 1")
    assert found.log[begin : end + 1] == [
        "generate",
        "sleep",
        "policy.log_probs",
        "reference.log_probs",
        "critic.advantages",
        "critic.update",
        "policy.update",
        "weights 1",
    ]


# Mini-batches and epochs


def test_every_epoch_draws_its_own_mini_batches_and_policy_and_critic_share_them(
    local_run: Run,
) -> None:
    found = local_run(
        UNPROVEN,
        "algorithm.advantage=gae",
        "batch.epochs=3",
        "batch.mini_batches=2",
        "run.steps=1",
    )
    outcome = found.fit()
    assert [batch.meta["epoch"] for batch, _ in found.policy.updates] == [0, 1, 2]
    drawn = [mini_batches_of(plan) for _, plan in found.policy.updates]
    assert drawn == [mini_batches_of(plan) for _, plan in found.critic.updates]
    assert len({str(epoch) for epoch in drawn}) > 1
    # The mean over epochs, each of which gives 1.
    assert outcome.steps[0]["policy/loss"] == 1.0


def mini_batches_of(plan: Plan) -> list[list[int]]:
    return [sorted(mini_batch.rows.tolist()) for mini_batch in plan.mini_batches]


# Staleness


def test_samples_are_as_old_as_the_steps_that_groups_are_generated_ahead(
    local_run: Run,
) -> None:
    found = local_run(
        "rollout.max_staleness=2", "run.steps=5", *VALIDATION, "validation.every=1"
    )
    outcome = found.fit()
    assert [step["rollout/staleness_max"] for step in outcome.steps] == [0, 1, 2, 2, 2]
    # What proves the first changed weights, and validations.
    assert len(found.of("generate")) == 1 + 6


def test_a_run_goes_on_with_the_groups_that_it_had_begun(local_run: Run) -> None:
    found = local_run("rollout.max_staleness=1", "run.steps=3")
    found.engines.slow = {"0"}
    found.run.begin()
    with found.run.record.step(1, 3):
        parts.step(found.run)
        found.run.step_finished()
    assert (found.run.buffer.position, found.run.buffer.active) == (6, [2, 3, 4, 5])


# What is recorded of samples


def test_samples_are_recorded_and_shown_with_what_they_were_asked(local_run: Run) -> None:
    found = local_run("run.log_completions=1", "run.steps=1")
    found.fit()
    rows = read_lines(found.folder / "samples.jsonl")
    assert {(row["uid"], row["prompt"], row["record"]) for row in rows} == {
        ("0", "0", "level: 0"),
        ("1", "1", "level: 1"),
    }
    assert "completions" in found.said


def test_sessions_are_counted_recorded_with_advantages_and_shown(
    local_run: Run, capsys: pytest.CaptureFixture[str]
) -> None:
    found = local_run("run.log_completions=1", "run.steps=1")
    found.rewards.reward = lambda uid, sample, greedy: Score(
        float(sample % 2), "said", session=tuple(FORKED)
    )
    outcome = found.fit()
    assert outcome.steps[0]["session/dropped_turns"] == 1
    assert "branch after turn 1" in found.said
    rows = read_lines(found.folder / "samples.jsonl")
    assert {row["reward"]: row["advantage"] > 0 for row in rows} == {0.0: False, 1.0: True}
    assert show([str(found.folder), "--step", "1", "--session", "1"]) == 0
    shown = capsys.readouterr().out
    assert (
        "branch after turn 1" in shown and f"advantage {rows[0]['advantage']:+.3f}" in shown
    )


def test_samples_are_recorded_before_the_error_that_ends_a_step(local_run: Run) -> None:
    found = local_run("run.steps=1")
    found.run.begin()
    with pytest.raises(KeyError), found.run.record.step(1, 1):
        parts.collect(found.run)
        raise KeyError
    assert (found.folder / "samples.jsonl").read_text().count("\n") > 1


def test_compiling_is_told_once(local_run: Run) -> None:
    found = local_run("run.steps=2")
    found.fit([lambda step, metrics: numba.njit(lambda: 1)() and None])
    assert found.said.count("compiling the planner, once") == 1


# A step without anything to learn from


def test_a_step_without_signal_updates_nothing_and_counts(local_run: Run) -> None:
    found = local_run("algorithm.zero_variance_groups=drop")
    found.rewards.reward = lambda uid, sample, greedy: float(sample if int(uid) < 2 else 1)
    outcome = found.fit()
    assert found.of("policy.update") == ["policy.update"]
    assert [step["rollout/samples_left_out"] for step in outcome.steps] == [0, 4, 4]
    assert [step["rollout/weight_version"] for step in outcome.steps] == [1, 1, 1]
    assert ["policy/loss" in step for step in outcome.steps] == [True, False, False]


@pytest.mark.parametrize("rule", ["keep", "drop"])
def test_a_run_without_signal_counts_its_groups_and_says_so(
    local_run: Run, rule: str
) -> None:
    found = local_run(f"algorithm.zero_variance_groups={rule}")
    found.rewards.reward = lambda uid, sample, greedy: 1.0
    outcome = found.fit()
    assert [step["rollout/groups_without_signal"] for step in outcome.steps] == [1, 1, 1]
    assert "steps 1 to 3: all rewards were equal in 100% of the groups" in found.said


@pytest.mark.parametrize("ahead", [0, 1])
@pytest.mark.parametrize(("with_signal", "trained"), [(0, [0, 0]), (1, [2, 0])])
def test_a_step_whose_groups_are_not_replaced_trains_on_the_others_if_there_are_any(
    local_run: Run, ahead: int, with_signal: int, trained: list[int]
) -> None:
    rules = (
        "algorithm.zero_variance_groups=replace",
        "algorithm.max_sampling_rounds=2",
        "run.steps=2",
    )
    found = local_run(UNPROVEN, f"rollout.max_staleness={ahead}", *rules)
    found.rewards.reward = lambda uid, sample, greedy: float(
        sample if int(uid) < with_signal else 1
    )
    outcome = found.fit()
    assert len(outcome.steps) == 2
    assert sum(len(batch) for batch, _ in found.policy.updates) == sum(trained)
    assert found.said.count("training on the others") == sum(map(bool, trained))
    assert found.said.count("nothing is trained in this step") == trained.count(0)


# What is saved when


def checkpoints(run: LocalRun) -> list[str]:
    return [path.name for path in checkpoints_at(run.folder)]


def test_checkpoints_and_models_are_saved_when_they_are_due(local_run: Run) -> None:
    found = local_run(
        "run.steps=5",
        "run.checkpoint_every=2",
        "run.save_every=3",
        "run.keep_checkpoints=2",
    )
    found.fit()
    assert checkpoints(found) == ["step-4", "step-2"]
    assert found.of("policy.save") == ["policy.save model-3", "policy.save model"]
    neither = local_run("run.name=neither", "run.steps=1")
    neither.fit()
    assert (checkpoints(neither), neither.of("policy.save")) == ([], ["policy.save model"])


@pytest.mark.parametrize(
    ("first", "before", "saves"), [(0.5, 0.5, 2), (float("nan"), 0.0, 3)]
)
def test_the_best_model_is_saved_whenever_validation_improves(
    local_run: Run, first: float, before: float, saves: int
) -> None:
    found = local_run("run.steps=4", *VALIDATION, "validation.every=1")
    # The first is of the model that the run was given.
    values = iter([first, 0.4, 0.7, 0.6, 0.8])
    by_validation: dict[int, float] = {}

    def reward(uid: str, sample: int, greedy: bool) -> float:
        if int(uid) < 1000:
            return float(sample % 2)
        number = len(found.engines.rounds)
        by_validation[number] = by_validation.get(number) or next(values)
        return by_validation[number]

    found.rewards.reward = reward
    outcome = found.fit()
    assert found.of("policy.save") == ["policy.save model-best"] * saves + [
        "policy.save model"
    ]
    assert (outcome.before["reward"], outcome.after["reward"]) == (before, 0.8)
    assert found.run.progress.best == 0.8


def test_a_validation_in_which_no_response_has_the_best_metric_saves_nothing(
    local_run: Run,
) -> None:
    found = local_run(
        "run.steps=2", VALIDATION[0], "validation.keep_best=exact", "validation.every=1"
    )

    def reward(uid: str, sample: int, greedy: bool) -> float | Score | None:
        held_out = (
            Score(0.0, "text", {"exact": 0.5}) if len(found.engines.rounds) < 3 else None
        )
        return float(sample % 2) if int(uid) < 1000 else held_out

    found.rewards.reward = reward
    assert len(found.fit().steps) == 2
    assert (
        "validation.keep_best=exact: no response of this validation has a value"
        in found.said
    )


def test_the_best_by_a_metric_that_there_is_not_is_refused(local_run: Run) -> None:
    found = local_run(VALIDATION[0], "validation.keep_best=nothing")
    with refused("validation.keep_best=nothing"):
        found.fit()


def interrupting(run: LocalRun, method: str, time: int) -> None:
    """Ctrl-C in the `time`-th call of a method of the policy."""
    usual, calls = getattr(run.policy, method), []
    dispatched = isinstance(usual, Method)

    def interrupted(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == time:
            raise KeyboardInterrupt
        return usual.call(*arguments) if dispatched else usual(*arguments)

    setattr(run.policy, method, Method(interrupted) if dispatched else interrupted)


@pytest.mark.parametrize(
    ("method", "every", "left"),
    [
        ("log_probs", 2, ["step-3", "step-2"]),  # step 3 is saved at the stop
        ("forward_backward", 2, ["step-2"]),  # the policy may have taken a part of step 4
        ("log_probs", 0, []),
    ],
)
def test_an_interrupt_leaves_a_checkpoint_of_the_last_complete_step(
    local_run: Run, method: str, every: int, left: list[str]
) -> None:
    found = local_run(
        f"run.checkpoint_every={every}", "batch.mini_batches=2", "run.steps=5"
    )
    # Of which a step has two.
    interrupting(found, method, 8 if method == "forward_backward" else 4)
    with pytest.raises(KeyboardInterrupt):
        found.fit()
    assert checkpoints(found) == left


def test_a_run_that_goes_on_validates_no_second_time_before_its_first_step(
    local_run: Run,
) -> None:
    found = local_run(*VALIDATION, "run.steps=2")
    found.run.progress = Progress(step=1)
    outcome = found.fit()
    assert len(outcome.steps) == 1
    assert len(found.of("generate")) == 1 + 1


# Callbacks


def test_callbacks_see_each_step_and_what_they_add_is_recorded(local_run: Run) -> None:
    found = local_run("data.validation=held_out.jsonl", "run.steps=2", "run.save_every=1")
    seen: list[tuple[int, Any]] = []

    def look(step: int, metrics: dict[str, float], run: RunView) -> None:
        seen.append((step, run))
        metrics["mine/responses"] = len({sample["response"] for sample in run.samples})

    def after_it(step: int, metrics: dict[str, float]) -> None:
        metrics["mine/double"] = 2 * metrics["mine/responses"]

    found.fit([look, after_it])
    rows = read_lines(found.folder / "metrics.jsonl")
    views = dict(seen)
    assert [row["step"] for row in rows] == list(views) == [0, 1, 2]
    for row in rows:
        samples = views[row["step"]].samples
        assert len(samples) == row.get("rollout/samples", 0)
        assert (
            row["mine/double"]
            == 2 * row["mine/responses"]
            == 2 * len({sample["response"] for sample in samples})
        )
    assert views[2].samples[0].keys() >= {"prompt", "response", "reward", "uid"}
    # Saved after the callback.
    assert [views[step].model.name for step in range(3)] == ["model", "model", "model-1"]


def test_a_callback_that_raises_ends_the_run_after_the_step_is_recorded_and_saved(
    local_run: Run,
) -> None:
    found = local_run("run.steps=3", "run.checkpoint_every=1")

    def fail(step: int, metrics: dict[str, float]) -> None:
        metrics["mine/step"] = step
        if step == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        found.fit([fail])
    rows = read_lines(found.folder / "metrics.jsonl")
    assert [row["mine/step"] for row in rows if row["step"]] == [1, 2]
    assert found.run.progress.step == 2


@pytest.mark.parametrize("added", ["text", None, [1.0], {"a": 1}])
def test_a_callback_adds_numbers_alone(added: Any) -> None:
    with refused("metrics['mine']="):
        as_metric("mine", added)


@pytest.mark.parametrize("callback", [5, lambda: None, lambda step: None, "text"])
def test_what_is_no_callback_is_refused(callback: Any) -> None:
    with refused("callbacks="):
        takes_run(callback)


@pytest.mark.parametrize("settings", [(), (*VALIDATION, "validation.at_start=false")])
def test_without_a_validation_before_the_first_step_no_callback_is_called_with_step_0(
    local_run: Run, settings: tuple[str, ...]
) -> None:
    found, steps = local_run(*settings, "run.steps=2"), list[int]()
    outcome = found.fit([lambda step, metrics: steps.append(step)])
    assert steps == [1, 2]
    assert outcome.before == {}
    assert bool(outcome.after) == bool(settings)
