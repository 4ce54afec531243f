"""Samples and scores, joined; references stand as names, nothing is fetched."""

from typing import Any

import numpy as np
import pytest

from controller.engines.engine_pool import Sample
from controller.rollout.samples import RolloutBatch, assemble
from workers.batch.score import Score
from workers.engine.requests import SampleResult
from workers.errors import RolloutError


def result(uid: str, sample: int, row: int, **facts: object) -> SampleResult:
    defaults = {"prompt_tokens": 3, "response_tokens": 5, "finish_reason": "stop", "weight_version": 2}
    return SampleResult(uid=uid, sample=sample, row=row, **(defaults | facts))


FINISHED: list[Any] = [
    (result("a", 0, 1), "x"),
    (result("a", 1, 0, finish_reason="length", response_tokens=9), "y"),
    (result("b", 0, 0), "x"),
]
DROPPED = [result("b", 1, -1, finish_reason="error", error="too long")]
SCORES = {
    ("b", 0): Score(0.0, "no", {"exact": 0.0}),
    ("a", 0): Score(1.0, "yes", {"exact": 1.0}),
    ("a", 1): Score(0.5, "so so"),
}


def assembled(scores: dict[Any, Score] = SCORES, **options: Any) -> RolloutBatch:
    return assemble(FINISHED, scores, dropped=DROPPED, retried=2, **options)


def alone(found: SampleResult, score: Score, **options: Any) -> RolloutBatch:
    samples: list[Sample] = [(found, "g")]  # type: ignore[list-item]
    return assemble(samples, {found.key: score}, **options)


def test_results_blocks_and_scores_are_joined_by_sample() -> None:
    batch = assembled().batch
    assert batch["uid"].tolist() == ["a", "a", "b"]
    assert batch["reward"].tolist() == [1.0, 0.5, 0.0]
    assert batch["length"].tolist() == [8, 12, 8]
    assert batch["truncated"].tolist() == [False, True, False]
    assert [(block, row) for block, _, row in batch.tokens["input_ids"]] == [("x", 1), ("y", 0), ("x", 0)]


def test_metrics_count_samples_drops_retries_and_the_prefix_cache() -> None:
    metrics = assembled().metrics()
    expected = {
        "rollout/samples": 3,
        "rollout/samples_dropped": 1,
        "rollout/samples_retried": 2,
        "reward/mean": 0.5,
        "reward/exact": 0.5,  # over the samples that have it
        "rollout/response_tokens_max": 9,
        "rollout/oldest_weight_version": 2,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)
    cached = alone(result("a", 0, 0, read_tokens=80, cached_tokens=20), Score(0.0, "")).metrics()
    assert cached["rollout/prefix_cache_hits"] == 0.25


def test_a_round_without_any_sample_is_an_error_with_its_reason() -> None:
    with pytest.raises(RolloutError, match="too long"):
        assemble([], {}, dropped=DROPPED)


def test_rounds_of_a_step_are_joined() -> None:
    joined = RolloutBatch.concat([assembled(), alone(result("c", 0, 0), Score(1.0, "yes"), retried=1)])
    assert joined.batch["uid"].tolist() == ["a", "a", "b", "c"]
    assert joined.scores()["reward"] == pytest.approx(2.5 / 4)
    assert (joined.dropped, joined.retried, joined.rounds) == (1, 3, 2)


def test_a_part_of_the_reward_added_later_counts_by_its_weight_and_is_logged() -> None:
    shaped = assembled().with_reward_part("model", np.array([2.0, 0.0, -4.0]), weight=0.5)
    assert shaped.batch["reward"].tolist() == [2.0, 0.5, -2.0]
    assert [score.parts["model"] for score in shaped.by_sample.values()] == [2.0, 0.0, -4.0]
    assert shaped.metrics()["reward/model"] == pytest.approx(-2 / 3)
    assert shaped.metrics()["reward/mean"] == pytest.approx(0.5 / 3)


def test_a_sample_without_a_score_counts_zero_or_is_dropped() -> None:
    scores = SCORES | {("a", 1): Score(0.0, "so so", failure="f: raised KeyError: 'x'")}
    kept, dropped = assembled(scores), assembled(scores, drop_failed=True)
    assert kept.batch["reward"].tolist() == [1.0, 0.0, 0.0]
    assert dropped.batch["uid"].tolist() == ["a", "b"]
    assert kept.metrics()["reward/failures"] == dropped.metrics()["reward/failures"] == 1


def test_samples_meet_the_greedy_response_to_their_prompt() -> None:
    greedy = alone(result("a", 0, 0), Score(0.75, "greedy"), dropped=DROPPED, retried=1)
    compared = assembled().with_baseline(greedy)
    assert compared.batch["uid"].tolist() == ["a", "a"]
    assert compared.batch["greedy_reward"].tolist() == [0.75, 0.75]
    assert list(compared.by_sample) == [("a", 0), ("a", 1)]
    assert (compared.dropped, compared.retried) == (
        2,
        3,
    )  # the one that failed, and the one without a baseline
    assert compared.metrics()["reward/greedy"] == compared.metrics()["reward/mean"] == 0.75
    with pytest.raises(RolloutError):
        assembled().with_baseline(alone(result("c", 0, 0), Score(1.0, "greedy")))


def test_tokens_of_an_environment_count_for_the_length_and_not_for_the_response() -> None:
    facts = result("a", 0, 0, observation_tokens=4, turns=3, newest_weight_version=3, finish_reason="turns")
    found = alone(facts, Score(1.0, "yes"))
    columns = {name: found.batch[name].item() for name in ("length", "response_tokens", "truncated")}
    assert columns == {"length": 12, "response_tokens": 5, "truncated": True}
    metrics = found.metrics()
    assert (metrics["rollout/turns_mean"], metrics["rollout/observation_tokens_mean"]) == (3, 4)
    assert (metrics["rollout/oldest_weight_version"], metrics["rollout/newest_weight_version"]) == (2, 3)


def test_texts_of_long_responses_are_read_for_the_examples_alone() -> None:
    asked: list[Any] = []

    def read(places: list[Any]) -> list[dict[str, Any]]:
        asked.extend(places)
        return [{"response": f"read {block} {row}"} for block, row, _ in places]

    lengths = [2_000, 5, 3_000, 1_001, 9_000]
    found: list[Any] = [(result("a", i, i, response_tokens=tokens), "x") for i, tokens in enumerate(lengths)]
    scores = {("a", i): Score(0.0, "" if tokens > 1_000 else "short") for i, tokens in enumerate(lengths)}
    rollout = assemble(found, scores).with_texts(1, read)
    assert asked == [("x", 0, 3), ("x", 4, 3)]  # the first and the longest
    assert [row["response"] for row in rollout.examples(1, lambda uid: {})] == ["read x 0", "read x 4"]
    assert [score.response for score in rollout.by_sample.values()] == [
        "read x 0",
        "short",
        "",
        "",
        "read x 4",
    ]
