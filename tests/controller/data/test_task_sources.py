"""Tasks of packages as records: what a name gives, how Reasoning Gym scores, and what is refused."""

import json
from pathlib import Path

import pytest
from reasoning_gym.factory import DATASETS, create_dataset

from controller.config import load
from controller.data.records import read_records
from controller.lifecycle.reward_inputs import find_environment
from controller.preflight.checks import check
from tests.controller.config_workspace import refusal
from tests.refusals import refused, refused_rows
from tests.workers.openenv.stand_in import StandIn, serving
from workers.reward_functions import reasoning_gym
from workers.user_code.task_sources import records as tasks_of
from workers.user_code.task_sources import task_records

QUICK = ("chain_sum", "decimal_arithmetic", "prime_factorization", "spell_backward")
REWARD = "reward.function=workers.reward_functions:reasoning_gym"
WRONG = ("", "no idea {[", "12", "<answer></answer>", "<answer>0</answer>")


def check_scores(name: str) -> None:
    """The reward of a record, which went through JSON, is the score of the data set itself."""
    dataset = create_dataset(name, size=2, seed=3)
    records = json.loads(json.dumps(tasks_of(f"reasoning_gym:{name}?size=2&seed=3")))
    for record, task in zip(records, dataset, strict=True):
        columns = {key: record[key] for key in ("question", "answer", "metadata")}
        assert record["prompt"] == [{"role": "user", "content": task["question"]}]
        given = task["answer"] or "x"
        for response in (given, f"<think>12</think> <answer>\n{given}</answer>"):
            assert reasoning_gym(response, **columns)["reward"] == dataset.score_answer(
                given.strip(), task
            ), name
        for response in WRONG:
            assert 0 <= reasoning_gym(response, **columns)["reward"] <= 1, (name, response)


@pytest.mark.parametrize("name", QUICK)
def test_a_record_is_scored_as_its_data_set_scores_it(name: str) -> None:
    check_scores(name)


@pytest.mark.slow
def test_every_data_set_gives_records_that_are_scored() -> None:
    for name in sorted(DATASETS.keys() - {*QUICK, "composite"}):
        check_scores(name)


def test_options_are_of_the_data_and_of_their_scores(workspace: Path) -> None:
    given = "reasoning_gym:decimal_arithmetic?size=3&max_num_decimal_places=6&min_num_decimal_places=6&seed="
    check(
        load(
            "config.yaml",
            [
                f"data.train={given}1",
                f"data.validation={given}2",
                "data.prompt_key=question",
                REWARD,
            ],
        )
    )
    first, second = (
        read_records(f"{given}1", "question"),
        read_records(f"{given}2", "question"),
    )
    assert len(first) == 3 and first != second
    coarse = {"size": 3, "max_num_decimal_places": 2, "min_num_decimal_places": 2}
    near = {"response": f"{float(first[0]['answer']) + 1e-4:.6f}"}
    columns = {key: first[0][key] for key in ("question", "answer", "metadata")}
    strict = reasoning_gym(**near, **columns)["reward"]
    loose = reasoning_gym(
        **near, **columns | {"metadata": columns["metadata"] | {"options": coarse}}
    )["reward"]
    assert strict < loose == 1


def test_the_same_name_gives_the_same_records_in_every_process() -> None:
    """This data set draws from a set of strings, whose order follows from Python's seed of hashes."""
    name = "reasoning_gym:isomorphic_strings?size=2"
    first = read_records(name)
    task_records.cache_clear()
    assert read_records(name) == first


@refused_rows("""
    data.train=reasoning_gym:leg_countin
    data.train='reasoning_gym:leg_counting?size'
    data.validation='reasoning_gym:leg_counting?legs=3'
    data.train=reasoning_gym:leg_counting data.prompt_key=words
    rollout.environment=verifiers:sums
""")
def test_what_a_package_does_not_have_is_refused(
    workspace: Path, named: str, overrides: list[str]
) -> None:
    """The last: the data are not the environment's tasks."""
    assert refusal(*overrides, REWARD).startswith((f"{named}: ", f"{overrides[0]}: "))


@pytest.mark.parametrize("key", ["data.train", "data.validation", "rollout.environment"])
@pytest.mark.parametrize("package", ["reasoning_gym", "verifiers", "openenv"])
def test_a_missing_package_is_named_with_its_extra(
    workspace: Path, monkeypatch: pytest.MonkeyPatch, key: str, package: str
) -> None:
    monkeypatch.setattr("workers.user_code.task_sources.find_spec", lambda name: None)
    said = refusal(f"{key}={package}:wordle")
    assert said.startswith(f"{key}={package}:wordle: ")
    one_turn = (key, package) == ("rollout.environment", "reasoning_gym")
    assert ("reward.function=" if one_turn else f"ballast-rl[{package}]") in said


@pytest.mark.parametrize(
    "options",
    ["", "?seeds=0", "?seeds=many", "?seeds=1&speed=2", "?file=none.jsonl", "?seeds"],
)
def test_openenv_data_without_an_end_or_with_unknown_options_are_refused(
    workspace: Path, options: str
) -> None:
    with serving(StandIn(typed=True)) as url:
        said = refusal(
            f"data.train=openenv:{url}{options}", f"rollout.environment=openenv:{url}"
        )
    assert said.startswith("data.train") and said.count("\n") == 0


def test_a_server_that_does_not_answer_is_refused_before_the_run(workspace: Path) -> None:
    url = "openenv:http://127.0.0.1:9"
    assert "127.0.0.1:9/schema" in refusal(
        f"data.train={url}?seeds=1", f"rollout.environment={url}"
    )
    config = load("config.yaml", [f"rollout.environment={url}"])
    with refused("rollout.environment"):
        find_environment(
            config, {"prompt": "x", "task": {"action": "", "reset": {}}}, print
        )
