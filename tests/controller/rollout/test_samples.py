import numpy as np
import pytest

from controller.engines.engine_pool import RolloutBatch
from controller.rollout.samples import Rollout, assemble
from workers.errors import RolloutError
from workers.rollout.requests import SampleResult
from workers.score import Score


def result(uid: str, sample: int, row: int, **facts: object) -> SampleResult:
    defaults = {"prompt_tokens": 3, "response_tokens": 5, "finish_reason": "stop", "weight_version": 2}
    return SampleResult(uid=uid, sample=sample, row=row, **(defaults | facts))


@pytest.fixture
def finished() -> RolloutBatch:
    """Three samples over two blocks, one more dropped; references stand as names, nothing is fetched."""
    results = [result("a", 0, 1), result("a", 1, 0, finish_reason="length", response_tokens=9), result("b", 0, 0)]
    dropped = [result("b", 1, -1, finish_reason="error", error="too long")]
    return RolloutBatch(results, ["x", "y", "x"], dropped, retried=2)


SCORES = {
    ("b", 0): Score(0.0, "no", {"exact": 0.0}),
    ("a", 0): Score(1.0, "yes", {"exact": 1.0}),
    ("a", 1): Score(0.5, "so so"),
}


def test_results_blocks_and_scores_are_joined_by_sample(finished: RolloutBatch) -> None:
    batch = assemble(finished, SCORES).batch
    assert batch["uid"].tolist() == ["a", "a", "b"]
    assert batch["reward"].tolist() == [1.0, 0.5, 0.0]
    assert batch["length"].tolist() == [8, 12, 8]
    assert batch["truncated"].tolist() == [False, True, False]
    tokens = batch.tokens["input_ids"]
    places = [(block, row) for block, _, row in tokens]
    assert places == [("x", 1), ("y", 0), ("x", 0)]


def test_what_was_dropped_and_retried_is_counted(finished: RolloutBatch) -> None:
    metrics = assemble(finished, SCORES).metrics()
    assert metrics["rollout/samples"] == 3
    assert metrics["rollout/samples_dropped"] == 1
    assert metrics["rollout/samples_retried"] == 2
    assert metrics["reward/mean"] == pytest.approx(0.5)
    assert metrics["reward/exact"] == pytest.approx(0.5)  # over the samples that have it
    assert metrics["rollout/response_tokens_max"] == 9
    assert metrics["rollout/oldest_weight_version"] == np.min([2, 2, 2])


def test_the_share_that_engines_had_in_their_prefix_cache_is_counted() -> None:
    results = [result("a", 0, 0, read_tokens=30), result("a", 1, 1, read_tokens=50, cached_tokens=20)]
    scores = {("a", 0): Score(0.0, ""), ("a", 1): Score(0.0, "")}
    assert assemble(RolloutBatch(results, ["x", "x"], [], 0), scores).metrics()["rollout/prefix_cache_hits"] == 0.25


def test_a_round_without_any_sample_is_an_error_with_its_reason(finished: RolloutBatch) -> None:
    with pytest.raises(RolloutError, match=r"no sample of this round was finished; .* because too long"):
        assemble(RolloutBatch([], [], finished.dropped, retried=0), {})


def test_rounds_of_a_step_are_joined(finished: RolloutBatch) -> None:
    other = RolloutBatch([result("c", 0, 0)], ["z"], [], retried=1)
    joined = Rollout.concat([assemble(finished, SCORES), assemble(other, {("c", 0): Score(1.0, "yes")})])
    assert joined.batch["uid"].tolist() == ["a", "a", "b", "c"]
    assert joined.scores()["reward"] == pytest.approx(2.5 / 4)
    assert (joined.dropped, joined.retried, joined.rounds) == (1, 3, 2)


def test_a_part_of_the_reward_added_later_counts_and_is_logged(finished: RolloutBatch) -> None:
    shaped = assemble(finished, SCORES).with_reward_part("penalty", np.array([0.0, -0.5, 0.0]))
    assert shaped.batch["reward"].tolist() == [1.0, 0.0, 0.0]
    assert shaped.metrics()["reward/penalty"] == pytest.approx(-0.5 / 3)
    assert shaped.metrics()["reward/mean"] == pytest.approx(1 / 3)


def test_a_weighted_part_is_kept_as_it_was_given(finished: RolloutBatch) -> None:
    scored = assemble(finished, SCORES).with_reward_part("model", np.array([2.0, 0.0, -4.0]), weight=0.5)
    assert scored.batch["reward"].tolist() == [2.0, 0.5, -2.0]
    assert [score.parts["model"] for score in scored.by_sample.values()] == [2.0, 0.0, -4.0]


def test_a_sample_without_a_score_counts_zero_or_is_dropped(finished: RolloutBatch) -> None:
    scores = SCORES | {("a", 1): Score(0.0, "so so", failure="f: raised KeyError: 'x'")}
    kept, dropped = assemble(finished, scores), assemble(finished, scores, drop_failed=True)
    assert kept.batch["reward"].tolist() == [1.0, 0.0, 0.0]
    assert dropped.batch["uid"].tolist() == ["a", "b"]
    assert kept.metrics()["reward/failures"] == dropped.metrics()["reward/failures"] == 1


def test_samples_meet_the_greedy_response_to_their_prompt(finished: RolloutBatch) -> None:
    greedy = RolloutBatch([result("a", 0, 0)], ["g"], [result("b", 0, -1, finish_reason="error")], retried=1)
    compared = assemble(finished, SCORES).with_baseline(assemble(greedy, {("a", 0): Score(0.75, "greedy")}))
    assert compared.batch["uid"].tolist() == ["a", "a"]
    assert compared.batch["greedy_reward"].tolist() == [0.75, 0.75]
    assert list(compared.by_sample) == [("a", 0), ("a", 1)]
    assert (compared.dropped, compared.retried) == (2, 3)  # the one that failed, and the one without a baseline
    assert compared.metrics()["reward/greedy"] == 0.75
    assert compared.metrics()["reward/mean"] == 0.75
    elsewhere = RolloutBatch([result("c", 0, 0)], ["g"], [], retried=0)
    with pytest.raises(RolloutError, match="no prompt of this round has both"):
        assemble(finished, SCORES).with_baseline(assemble(elsewhere, {("c", 0): Score(1.0, "greedy")}))


def test_tokens_of_an_environment_count_for_the_length_and_not_for_the_response() -> None:
    results = [result("a", 0, 0, observation_tokens=4, turns=3, newest_weight_version=3, finish_reason="turns")]
    found = assemble(RolloutBatch(results, ["x"], [], retried=0), {("a", 0): Score(1.0, "yes")})
    assert (found.batch["length"].tolist(), found.batch["response_tokens"].tolist()) == ([12], [5])
    assert found.batch["truncated"].tolist() == [True]
    metrics = found.metrics()
    assert (metrics["rollout/turns_mean"], metrics["rollout/observation_tokens_mean"]) == (3, 4)
    assert (metrics["rollout/oldest_weight_version"], metrics["rollout/newest_weight_version"]) == (2, 3)
