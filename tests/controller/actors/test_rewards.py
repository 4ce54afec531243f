"""A pool of reward workers: actors that score long responses and send back numbers alone."""

import pickle
from pathlib import Path

import cloudpickle
import numpy as np
import pytest
import ray

from controller.actors.rewards import RewardPool
from controller.config.sections import RewardConfig
from controller.data.prompts import Prompt
from controller.rollout.samples import assemble
from workers.batch.dataproto import DataProto
from workers.batch.score import TOOL_PARTS, Score
from workers.engine.requests import SampleResult
from workers.errors import DataError
from workers.user_code.rewards import RewardFunction

pytestmark = pytest.mark.usefixtures("ray_session")
LONG = 3_000


def rows(count: int, ids: list[int]) -> list[dict[str, np.ndarray]]:
    """A prompt of two tokens and LONG of a response, the last of which say which it is."""
    found = [
        np.array([*ids[:2], *[ids[0]] * (LONG - 1), ids[row]], np.int32)
        for row in range(count)
    ]
    versions = np.array([-1, -1, *[0] * LONG], np.int32)
    return [{"input_ids": each, "weight_versions": versions} for each in found]


@pytest.mark.parametrize(
    ("parts", "environment"),
    [
        ({"mean": 9.0}, None),
        ({"mean": 9.0}, {}),
        ({}, {"std": 1.0}),
        ({"format": 1.0}, {"format": 0.0}),
    ],
)
def test_the_first_sample_with_a_reserved_part_ends_the_run(
    parts: dict[str, float], environment: dict[str, float] | None
) -> None:
    pool = object.__new__(RewardPool)  # joining starts nothing
    pool._adds, pool._on_failure = True, "zero"
    played = None if environment is None else Score(1.0, "", environment)
    with pytest.raises(DataError, match="reward part"):
        pool.join_scores(
            [SampleResult("a", 0, 2, 3, "stop", 0, environment=played)],
            [Score(0.25, "", parts)],
        )
    tools = Score(1.0, "", dict.fromkeys((*TOOL_PARTS, "agent"), 1.0))
    pool.join_scores(
        [SampleResult("a", 0, 2, 3, "stop", 0, environment=tools)],
        [Score(0.25, "", {"exact": 1.0})],
    )


def test_long_texts_stay_with_the_tokens_and_outlive_their_reward_worker(
    stand_in_folder: Path,
) -> None:
    last = RewardFunction(
        "last", 1.0, cloudpickle.dumps(lambda response: int(response[-1])), ()
    )
    pool = RewardPool(
        [last], str(stand_in_folder / "model"), RewardConfig(workers=1), cpus=0.1
    )
    ids = pool._tokenizer.convert_tokens_to_ids(list("0123"))
    block = ray.put(DataProto.from_rows(rows(4, ids)))
    results = [SampleResult("a", row, 2, LONG, "stop", 0, row=row) for row in range(4)]
    prompts = {"a": Prompt("a", np.array(ids[:2], np.int32), {"prompt": "01"})}

    scoring = pool.begin(texts=False)
    scoring.submit(results, block, prompts)
    scores = scoring.collect()
    assert [score.reward for score in scores.values()] == [0, 1, 2, 3]
    assert len(pickle.dumps(scores)) < LONG
    ray.kill(pool._actors[0], no_restart=False)

    rollout = assemble([(result, block) for result in results], scores).with_texts(
        2, pool.read
    )
    texts = [
        row["response"] for row in rollout.examples(2, lambda uid: {}, characters=2 * LONG)
    ]
    assert texts == ["0" * (LONG - 1) + str(row) for row in range(2)]

    everything = pool.begin()
    everything.submit(results, block, prompts)  # to the worker in its place
    assert [score.response for score in everything.collect().values()] == [
        "0" * (LONG - 1) + str(row) for row in range(4)
    ]
    pool.stop()
