"""Samples and scores, joined; references stand as names, nothing is fetched."""

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from controller.data.prompts import Prompt
from controller.engines.engine_pool import Sample
from controller.rollout.batch_rows import assign_teachers, sample_numbers
from controller.rollout.model_scores import ScoreScales
from controller.rollout.samples import RolloutBatch, assemble
from tests.controller.observability.recorded_sessions import FORKED
from workers.batch.remote_batch import RemoteBatch
from workers.batch.score import Score
from workers.config.loss import TeacherConfig
from workers.engine.requests import SampleResult
from workers.errors import RolloutError


def result(uid: str, sample: int, row: int, **facts: object) -> SampleResult:
    defaults = {
        "prompt_tokens": 3,
        "response_tokens": 5,
        "finish_reason": "stop",
        "weight_version": 2,
    }
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
    assert [(block, row) for block, _, row in batch.tokens["input_ids"]] == [
        ("x", 1),
        ("y", 0),
        ("x", 0),
    ]


def test_metrics_count_samples_drops_and_retries() -> None:
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


def test_prefix_cache_hits_are_of_all_tokens_read() -> None:
    read = [(80, 20), (20, 20)]
    samples: list[Any] = [
        (result("a", sample, 0, read_tokens=tokens, cached_tokens=cached), "x")
        for sample, (tokens, cached) in enumerate(read)
    ]
    scores = {("a", sample): Score(0.0, "") for sample in range(len(read))}
    assert assemble(samples, scores).metrics()["rollout/prefix_cache_hits"] == 0.4


def test_rows_of_a_sample_have_its_number() -> None:
    uids = np.array(["a", "a", "a", "b", "b"])
    rows = RemoteBatch({"uid": uids, "sample": np.array([0, 0, 1, 1, 0])}, {})
    assert sample_numbers(rows).tolist() == [0, 0, 1, 2, 3]
    assert sample_numbers(rows.select(np.array([], np.int64))).tolist() == []


@pytest.mark.parametrize("with_context", [False, True])
def test_a_teacher_is_named_by_the_record_and_reads_its_own_prompt(
    with_context: bool,
) -> None:
    batch = assembled().batch
    teacher_ids = {"a": np.arange(7, dtype=np.int32), "b": np.arange(2, dtype=np.int32)}
    prompts = {
        uid: Prompt(uid, np.arange(3), {"teacher": f"teacher of {uid}"}, teacher_ids=ids)
        for uid, ids in teacher_ids.items()
    }
    settings = TeacherConfig(paths={"x": "y"}, context_key="hint" if with_context else "")
    names, read = assign_teachers(settings, batch, prompts)
    assert names.tolist() == ["teacher of a", "teacher of a", "teacher of b"]
    assert assign_teachers(replace(settings, paths={}), batch, prompts)[0].tolist() == [
        "",
        "",
        "",
    ]
    if not with_context:
        assert read is batch
        return
    assert read["prompt_tokens"].tolist() == [7, 7, 2]
    assert read["length"].tolist() == [8 + 4, 12 + 4, 8 - 1]
    assert read["prompt_hash"].tolist() == [0, 0, 1]
    assert [ids.tolist() for ids in read["teacher_prompt"]] == [
        teacher_ids[uid].tolist() for uid in ("a", "a", "b")
    ]


def test_a_session_is_recorded_with_ten_times_the_texts_of_an_answer() -> None:
    messages = [{"role": "user", "content": "q" * 1000}]
    session = [{"messages": messages, "said": {"role": "assistant", "content": "s" * 1000}}]
    (example,) = alone(result("a", 0, 0), Score(1.0, "r", session=session)).examples(
        1, lambda uid: {}, 100
    )
    lengths = [
        len(node["said"]) + len(node["messages"][0]["content"])
        for node in example["session"]
    ]
    assert 900 < sum(lengths) < 1100


def test_a_round_without_any_sample_is_an_error_with_its_reason() -> None:
    with pytest.raises(RolloutError, match="too long"):
        assemble([], {}, dropped=DROPPED)


def test_rounds_of_a_step_are_joined() -> None:
    joined = RolloutBatch.concat(
        [assembled(), alone(result("c", 0, 0), Score(1.0, "yes"), retried=1)]
    )
    assert joined.batch["uid"].tolist() == ["a", "a", "b", "c"]
    assert joined.scores()["reward"] == pytest.approx(2.5 / 4)
    assert (joined.dropped, joined.retried, joined.rounds) == (1, 3, 2)


def test_scores_of_models_are_scaled_by_all_so_far() -> None:
    config: Any = SimpleNamespace(
        reward=SimpleNamespace(model=SimpleNamespace(named_weights={"a": 0.5, "b": 2.0}))
    )
    batches = {
        "a": ([1.0, 2.0, 6.0], [10.0, 11.0, -5.0]),
        "b": ([3.0, 3.0, 4.0], [0.0, 1.0, 1.0]),
    }
    scales = ScoreScales({})
    for number in range(2):
        rollout = assembled()
        for name, scores in batches.items():
            rollout = rollout.with_reward_part(
                f"model_{name}", np.array(scores[number]), weight=0.0
            )
        rewards = [score.reward for score in rollout.by_sample.values()]
        scaled = scales.normalize(config, rollout)
        expected = np.array(rewards)
        for name, weight in config.reward.model.named_weights.items():
            new = np.array(batches[name][number])
            so_far = np.concatenate(batches[name][: number + 1])
            expected += weight * ((new - so_far.mean()) / so_far.std() - new)
        assert [score.reward for score in scaled.by_sample.values()] == pytest.approx(
            expected.tolist()
        )
        scales = ScoreScales(scales.state)  # as from a checkpoint


def test_samples_meet_the_greedy_response_to_their_prompt() -> None:
    greedy = alone(result("a", 0, 0), Score(0.75, "greedy"), dropped=DROPPED, retried=1)
    compared = assembled().with_baseline(greedy)
    assert compared.batch["uid"].tolist() == ["a", "a"]
    assert compared.batch["greedy_reward"].tolist() == [0.75, 0.75]
    assert list(compared.by_sample) == [("a", 0), ("a", 1)]
    # The one that failed, and the one without a baseline.
    assert (compared.dropped, compared.retried) == (2, 3)
    assert compared.metrics()["reward/greedy"] == compared.metrics()["reward/mean"] == 0.75
    with pytest.raises(RolloutError):
        assembled().with_baseline(alone(result("c", 0, 0), Score(1.0, "greedy")))


def test_tokens_of_an_environment_count_for_the_length_and_not_for_the_response() -> None:
    facts = result(
        "a",
        0,
        0,
        observation_tokens=4,
        turns=3,
        newest_weight_version=3,
        finish_reason="turns",
    )
    found = alone(facts, Score(1.0, "yes"))
    columns = {
        name: found.batch[name].item()
        for name in ("length", "response_tokens", "truncated")
    }
    assert columns == {"length": 12, "response_tokens": 5, "truncated": True}
    metrics = found.metrics()
    assert (metrics["rollout/turns_mean"], metrics["rollout/observation_tokens_mean"]) == (
        3,
        4,
    )
    assert (
        metrics["rollout/oldest_weight_version"],
        metrics["rollout/newest_weight_version"],
    ) == (2, 3)


def test_texts_of_long_responses_are_read_for_the_examples_alone() -> None:
    asked: list[Any] = []

    def read(places: list[Any]) -> list[dict[str, Any]]:
        asked.extend(places)
        return [{"response": f"read {block} {row}"} for block, row, _ in places]

    lengths = [2_000, 5, 3_000, 1_001, 9_000]
    found: list[Any] = [
        (result("a", i, i, response_tokens=tokens), "x") for i, tokens in enumerate(lengths)
    ]
    scores = {
        ("a", i): Score(0.0, "" if tokens > 1_000 else "short")
        for i, tokens in enumerate(lengths)
    }
    rollout = assemble(found, scores).with_texts(1, read)
    assert asked == [("x", 0, 3), ("x", 4, 3)]  # the first and the longest
    assert [row["response"] for row in rollout.examples(1, lambda uid: {})] == [
        "read x 0",
        "read x 4",
    ]
    assert [score.response for score in rollout.by_sample.values()] == [
        "read x 0",
        "short",
        "",
        "",
        "read x 4",
    ]


def test_rewards_of_an_episodes_turns_are_means_by_turn_and_not_of_sessions() -> None:
    credits = {("a", 0): (1.0, 4.0), ("a", 1): (3.0,), ("b", 0): (8.0,)}
    scores = {
        (uid, sample): Score(
            sum(rewards),
            "",
            credit=tuple((1, reward, 0) for reward in rewards),
            session=tuple(FORKED) if uid == "b" else (),
        )
        for (uid, sample), rewards in credits.items()
    }
    metrics = assembled(scores).metrics()
    shown = {name: value for name, value in metrics.items() if name.startswith("turn/")}
    assert shown == {
        "turn/reward/1": 2.0,
        "turn/samples/1": 2.0,
        "turn/reward/2": 4.0,
        "turn/samples/2": 1.0,
    }
