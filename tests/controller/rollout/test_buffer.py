"""The samples of a step, rule by rule: the real buffer over engines and rewards that answer at once."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from controller.data.sample_functions import FORMS, SampleFunction
from controller.observability.report import failure_lines
from controller.observability.run_folder import RunFolder
from controller.rollout.buffer import RolloutBuffer, overlong_penalty
from controller.rollout.samples import RolloutBatch
from tests.controller.stand_ins.roles import LocalRun
from tests.refusals import refused
from workers.batch.score import Score
from workers.engine.requests import VALIDATION_STEP
from workers.errors import RolloutError

Run = Callable[..., LocalRun]


def collected(run: LocalRun, step: int = 1, position: int = 0) -> RolloutBatch:
    run.run.buffer.position = position
    return run.run.buffer.collect(step)


def signal_in(*uids: str) -> Callable[[str, int, bool], float]:
    """Rewards that differ within the groups of these prompts alone."""
    return lambda uid, sample, greedy: float(sample if uid in uids else 1)


def uids(rollout: RolloutBatch) -> list[str]:
    return sorted(set(rollout.trained["uid"].tolist()), key=int)


def test_every_prompt_is_sampled_several_times_with_seeds_of_their_own(
    local_run: Run,
) -> None:
    found = local_run()
    collected(found)
    ((requests, sampling),) = found.engines.rounds
    assert [request.key for request in requests] == [("0", 0), ("0", 1), ("1", 0), ("1", 1)]
    assert len({request.seed for request in requests}) == 4
    assert sampling == found.config.rollout.sampling
    assert found.run.buffer.position == 2
    again = local_run()
    collected(again)
    assert [r.seed for r in again.engines.rounds[0][0]] == [r.seed for r in requests]
    collected(again, step=2)
    assert not {r.seed for r in again.engines.rounds[1][0]} & {r.seed for r in requests}


def test_prompts_that_a_run_had_begun_ahead_come_first(local_run: Run) -> None:
    found = local_run()
    run = found.run
    progress = replace(run.progress, position=9, active=[3, 5, 6])
    buffer = RolloutBuffer(
        found.config, run.roles, run.buffer.prompts, run.planner, run.record, progress
    )
    assert uids(buffer.collect(1)) == ["3", "5"]
    assert (buffer.position, buffer.active) == (9, [6])
    assert uids(buffer.collect(2)) == ["6", "9"]
    assert (buffer.position, buffer.active) == (10, [])


@pytest.mark.parametrize(
    ("settings", "reads"),
    [
        ([], False),
        (["run.record_samples=true"], True),
        (["rollout.max_staleness=1"], False),
    ],
)
def test_steps_leave_long_texts_where_they_are_unless_all_are_read(
    local_run: Run, settings: list[str], reads: bool
) -> None:
    found = local_run("data.validation=''", "run.steps=1", *settings)
    found.run.buffer.begin()
    collected(found)
    assert found.rewards.texts == [reads]


def test_validation_functions_of_responses_and_callbacks_that_see_samples_read_all_texts(
    local_run: Run,
) -> None:
    found = local_run("run.steps=1")
    buffer = found.run.buffer
    buffer.roll_out(
        buffer.next_prompts(2), 1, found.config.rollout.sampling, VALIDATION_STEP
    )
    buffer.functions = {
        ("run.metrics"): SampleFunction(None, ("response",), FORMS["run.metrics"])
    }  # type: ignore[arg-type]
    collected(found)
    assert found.rewards.texts == [True, True]
    seen = local_run("run.steps=1", "data.validation=''")
    seen.fit([lambda step, metrics, view: None])
    assert seen.rewards.texts == [True]


# Groups without signal


@pytest.mark.parametrize(("rule", "kept"), [("keep", ["0", "1"]), ("drop", ["1"])])
def test_groups_of_equal_rewards_are_kept_or_dropped(
    local_run: Run, rule: str, kept: list[str]
) -> None:
    found = local_run(f"algorithm.zero_variance_groups={rule}")
    found.rewards.reward = signal_in("1")
    result = collected(found)
    assert (uids(result), found.run.buffer.position) == (kept, 2)
    assert len(result.batch) == 4  # metrics are of all samples


@pytest.mark.parametrize(
    ("rounds", "asked", "kept"),
    [(4, ["01", "2", "3"], ["1", "3"]), (2, ["01", "2"], ["1"])],
)
def test_groups_of_equal_rewards_are_replaced_by_the_next_prompts_for_the_rounds_allowed(
    local_run: Run, rounds: int, asked: list[str], kept: list[str]
) -> None:
    found = local_run(
        "algorithm.zero_variance_groups=replace", f"algorithm.max_sampling_rounds={rounds}"
    )
    found.rewards.reward = signal_in("1", "3")
    result = collected(found)
    assert [
        "".join(r.uid for r in requests[::2]) for requests, _ in found.engines.rounds
    ] == asked
    assert (uids(result), found.run.buffer.position) == (kept, int(asked[-1]) + 1)
    assert result.metrics()["rollout/sampling_rounds"] == len(asked)
    assert ("algorithm.max_sampling_rounds=2" in found.said) == (rounds == 2)


# Baselines


def test_remax_samples_each_prompt_once_more_greedily(local_run: Run) -> None:
    found = local_run(
        "algorithm.advantage=remax",
        "rollout.sampling.top_p=0.9",
        "rollout.sampling.top_k=5",
    )
    found.rewards.reward = lambda uid, sample, greedy: (
        10.0 + int(uid) if greedy else float(sample)
    )
    result = collected(found)
    (_, sampling), (greedy, greedy_sampling) = found.engines.rounds
    assert [request.key for request in greedy] == [("0", 0), ("1", 0)]
    assert (greedy_sampling.temperature, greedy_sampling.top_p, greedy_sampling.top_k) == (
        0,
        1,
        0,
    )
    assert sampling.temperature == 1
    assert result.trained["greedy_reward"].tolist() == [10, 10, 11, 11]
    assert result.trained["reward"].tolist() == [0, 1, 0, 1]


# Rewards


def test_the_penalty_falls_linearly_over_the_last_tokens() -> None:
    penalty = overlong_penalty(
        np.array([1, 60, 70, 80, 99, 100]), longest=100, overlong_tokens=40
    )
    assert penalty.tolist() == pytest.approx([0, 0, -0.25, -0.5, -0.975, -1])


def test_long_responses_and_their_greedy_baseline_are_punished_alike(
    local_run: Run,
) -> None:
    found = local_run(
        "algorithm.advantage=remax",
        "reward.overlong_tokens=2",
        "reward.overlong_penalty=0.5",
    )
    batch = collected(found).trained  # all responses are as long as they may be
    assert batch["reward"].tolist() == [-0.5, 0.5, -0.5, 0.5]
    assert batch["greedy_reward"].tolist() == [-0.5] * 4


def test_a_reward_model_adds_its_scores_by_weight_while_the_engines_sleep(
    local_run: Run,
) -> None:
    found = local_run("reward.model.path=judge", "reward.model.weight=0.25")
    batch = collected(found).trained
    assert batch["reward"].tolist() == [0, 1.25, 0.5, 1.75]
    assert found.log == ["generate", "sleep", "reward_model.score"]


def test_several_reward_models_are_normalised_by_their_scores_so_far(
    local_run: Run,
) -> None:
    weights = "reward.model.weights={second: 2}"
    found = local_run(
        "reward.model.paths={first: judge, second: judge}",
        weights,
        "reward.model.normalize=running",
    )
    scores = np.arange(4.0)
    first = collected(found)
    assert first.trained["reward"] - [0, 1, 0, 1] == pytest.approx(
        3 * (scores - scores.mean()) / scores.std()
    )
    assert first.metrics()["reward/model_second"] == scores.mean(), "as the model gave it"
    assert found.run.state()["score_scales"] == found.run.buffer.score_scales.state
    found.reward_model.scores = np.array([0, np.nan, 0, 0])
    with refused("reward.model.paths.first=judge", RolloutError):
        collected(found, 2)


@pytest.mark.parametrize(
    ("rule", "rewards"), [("zero", [0.0, 1.0, 0.0, 0.0]), ("drop", [0.0, 1.0, 0.0])]
)
def test_a_sample_whose_reward_failed_counts_zero_or_is_dropped_and_is_said(
    local_run: Run, rule: str, rewards: list[float]
) -> None:
    found = local_run(f"reward.on_failure={rule}")
    found.rewards.reward = lambda uid, sample, greedy: (
        None if (uid, sample) == ("1", 1) else float(sample)
    )
    assert collected(found).trained["reward"].tolist() == rewards
    assert (
        f"rewards failed (reward.on_failure={rule}): 1, the first: prompt 1, sample 1: no reward"
        in found.said
    )


@pytest.mark.parametrize(
    "settings", [[], ["rollout.max_staleness=1"], ["algorithm.advantage=remax"]]
)
def test_dropped_and_retried_samples_have_one_line_a_step_with_count_place_and_cause(
    local_run: Run, settings: list[str]
) -> None:
    found = local_run(
        "data.validation=''", "run.steps=1", "rollout.max_retries=2", *settings
    )
    found.engines.failing, found.engines.max_retries = {"1"}, 2
    if found.engines._generation is not None:
        found.engines._generation.router.max_retries = 2
    buffer, record = found.run.buffer, found.run.record
    with record.step(1, 1):
        buffer.begin()
        buffer.collect(1)
        assert "dropped" not in found.said, "once a step, at its end"
    lost = 3 if "algorithm.advantage=remax" in settings else 2
    rows = {row["kind"]: row for row in RunFolder(found.config.run_folder).failures}
    counts = {kind: row["count"] for kind, row in rows.items()}
    assert counts == {
        "samples dropped (rollout.max_retries=2)": lost,
        "samples retried": 2 * lost,
    }
    for kind, row in rows.items():
        assert row["first"] == "prompt 1, sample 0: no such token"
        assert (
            found.said.count(
                f"step 1: {kind}: {row['count']}, the first: prompt 1, sample 0: no such token"
            )
            == 1
        )
    assert failure_lines(RunFolder(found.config.run_folder))[0].endswith(
        "prompt 1, sample 0: no such token"
    )


def test_each_cause_of_failed_rewards_has_its_line(local_run: Run) -> None:
    found = local_run()
    causes = {0: "no key 'a'", 1: "took 3 s"}
    found.rewards.reward = lambda uid, sample, greedy: Score(
        0.0, "", failure=f"{causes[sample]}{uid}"
    )
    collected(found)
    for sample, cause in causes.items():
        line = f"rewards failed (reward.on_failure=zero): 2, the first: prompt 0, sample {sample}: {cause}0"
        assert found.said.count(line) == 1
    assert len(failure_lines(RunFolder(found.config.run_folder))) == 2


def test_a_round_in_which_every_reward_failed_is_an_error(local_run: Run) -> None:
    found = local_run("reward.on_failure=drop")
    found.rewards.reward = lambda uid, sample, greedy: None
    with pytest.raises(RolloutError, match="given up because no reward"):
        collected(found)


def test_columns_of_the_records_travel_to_the_loss(local_run: Run) -> None:
    found = local_run(
        "algorithm.loss.name=custom",
        "algorithm.loss.function=losses.py:loss",
        "algorithm.loss.columns=level",
    )
    assert collected(found, position=4).trained["level"].tolist() == [4, 4, 5, 5]
