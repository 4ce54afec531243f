"""Episodes on a real engine: what it sampled is what the trainer computes the log-probs of."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from tests.workers.rollout import tiny
from tests.workers.rollout.conftest import Engines, requests_for, rows_of
from workers.config import ModelConfig
from workers.dataproto import DataProto
from workers.model.engine import TrainingEngine
from workers.rollout.requests import LENGTH, STOP, EpisodeStart, SampleRequest

TOLERANCE = 1e-4


def episodes(count: int, samples: int, opening: str = "(") -> list[SampleRequest]:
    return [replace(r, start=EpisodeStart({"opening": opening}, "")) for r in requests_for(count, samples, step=5)]


def trainer_log_probs(rows: list[dict[str, np.ndarray]], path: Path) -> np.ndarray:
    """Of all rows' tokens one after another, by the training engine on packed micro-batches."""
    sequences = DataProto.from_list(
        [{name: torch.tensor(row[name]) for name in ("input_ids", "loss_mask")} for row in rows],
    )
    engine = TrainingEngine(ModelConfig(path=str(path)), optimizer=None, total_steps=0, device="cpu")
    log_probs, _ = engine.log_probs(sequences, [(0, len(rows))])
    return log_probs.numpy()


@pytest.fixture
def trained_path(engines: Engines, tiny_model_path: Path, tmp_path: Path) -> Path:
    """A model that the engine has just been given, with its tokenizer."""
    engines.load(tiny.random_model(11))
    tiny.random_model(11).save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(tiny_model_path).save_pretrained(tmp_path)
    return tmp_path


def test_no_token_of_an_episode_is_another_than_the_engine_sampled(engines: Engines, trained_path: Path) -> None:
    finished = engines.sample(episodes(8, samples=8), max_new_tokens=90)
    rows = [row for _, row in rows_of(finished)]
    expected = trainer_log_probs(rows, trained_path)
    sampled = np.concatenate([row["rollout_log_probs"] for row in rows])
    mask = np.concatenate([row["loss_mask"] for row in rows])
    assert np.abs(expected - sampled)[mask].max() < TOLERANCE
    assert (sampled[~mask] == 0).all() and (sampled[mask] < 0).all()
    assert {result.turns for result in finished.results} == {1, 2}
    assert {result.finish_reason for result in finished.results} <= {STOP, LENGTH}


def test_the_environments_tokens_stand_between_the_turns_and_are_not_learned(
    engines: Engines, tiny_model_path: Path
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_model_path)
    requests = {request.key: request for request in episodes(8, samples=8)}
    finished = engines.sample(list(requests.values()), max_new_tokens=90)
    for result, row in rows_of(finished):
        ids, mask = row["input_ids"].tolist(), row["loss_mask"].tolist()
        begin, [opening] = result.prompt_tokens, tokenizer("(")["input_ids"]
        assert ids[:begin] == [*requests[result.key].prompt_ids.tolist(), opening]
        assert result.length == len(ids)
        assert result.response_tokens == sum(mask)
        if result.turns == 2:
            end = ids.index(tiny.EOS, begin) + 1
            text = tokenizer.decode(ids[begin:end], skip_special_tokens=True)
            observed = tokenizer(f"<{text[:1]}>")["input_ids"]
            assert ids[end : end + len(observed)] == observed
            later = [True] * (len(ids) - end - len(observed))
            assert mask == [False] * begin + [True] * (end - begin) + [False] * len(observed) + later
            assert (result.environment.reward, result.environment.parts) == (1.0, {"turn": 2.0})


def test_episodes_repeat_by_their_seeds_and_their_turns_differ(engines: Engines, trained_path: Path) -> None:
    first, second = (rows_of(engines.sample(episodes(6, samples=2))) for _ in range(2))
    for (_, row), (_, again) in zip(first, second, strict=True):
        np.testing.assert_array_equal(row["input_ids"], again["input_ids"])


def test_a_failing_environment_costs_its_episode_alone(engines: Engines) -> None:
    good, bad = episodes(3, samples=2), episodes(1, samples=2, opening="raise")
    bad = [replace(request, uid="bad") for request in bad]
    finished = engines.sample([*good[:2], *bad, *good[2:]])
    failures = {result.key: result.environment.failure for result in finished.results}
    assert {key for key, failure in failures.items() if failure} == {("bad", 0), ("bad", 1)}
    assert failures["bad", 0] == "environment: reset raised KeyError: 'no such record'"
    assert all(result.response_tokens > 0 for result in finished.results)


def test_an_episode_keeps_to_its_tokens(engines: Engines) -> None:
    finished = engines.sample(episodes(8, samples=4), max_new_tokens=6)
    limit = 2 * 6  # max_turns * max_new_tokens
    for result in finished.results:
        assert result.length - result.prompt_tokens <= limit - 1  # the opening counts
