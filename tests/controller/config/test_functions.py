from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from controller.config.functions import (
    check_reward_function,
    requested_columns,
    source_file,
)
from tests.refusals import refused
from workers.environment import Observation
from workers.errors import DataError
from workers.user_code.environments import try_environment
from workers.user_code.functions import load, signature_of
from workers.user_code.rewards import RewardFunction, try_rewards

RECORD = {"prompt": "1+1=", "answer": "2", "source": "x"}


@pytest.mark.parametrize(
    "name",
    [
        "reward",
        "no.such.module:reward",
        "no/such/file.py:reward",
        "examples.addition.reward:grade",
    ],
)
def test_what_is_missing_is_named(name: str) -> None:
    with refused("data.curriculum"):
        load("data.curriculum", name)


def test_a_function_gets_the_columns_that_it_names() -> None:
    assert requested_columns(signature_of(lambda response, answer: 0.0), RECORD, "f") == (
        "answer",
    )
    assert requested_columns(
        signature_of(lambda response, prompt, source="": 0.0), RECORD, "f"
    ) == (
        "prompt",
        "source",
    )
    assert requested_columns(
        signature_of(lambda response, **columns: 0.0), RECORD, "f"
    ) == (
        "answer",
        "prompt",
        "source",
    )
    assert (
        requested_columns(signature_of(lambda response, strict=True: 0.0), RECORD, "f")
        == ()
    )


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (lambda response, solution: 0.0, "'solution'"),
        (lambda text: 0.0, "'response'"),
        (lambda completions, **columns: [0.0], "'responses'"),  # as rewards of TRL
        (lambda prompts, completions: [0.0], "'responses'"),
        (
            lambda data_sources, solution_strs, ground_truths, extra_infos: 0.0,
            "'solution_strs'",
        ),  # verl's batched form
    ],
)
def test_a_parameter_that_is_missing_or_has_no_column_is_named(
    reward: Callable[..., Any], named: str
) -> None:
    with refused(named):
        requested_columns(signature_of(reward), RECORD, "f")


def compute_score(data_source, solution_str, ground_truth, extra_info=None):  # type: ignore[no-untyped-def]
    return float(solution_str == ground_truth)


VERL = {
    "prompt": [],
    "data_source": "gsm8k",
    "reward_model": {"style": "rule", "ground_truth": "4"},
}


def test_verls_arguments_come_from_its_columns() -> None:
    taken = requested_columns(
        signature_of(compute_score), VERL | {"extra_info": {}, "answer": "5"}, "f"
    )
    assert taken == ("data_source", "extra_info", "reward_model")
    taken = requested_columns(
        signature_of(compute_score), VERL | {"ground_truth": "4"}, "f"
    )
    assert taken == ("data_source", "ground_truth")
    assert (
        requested_columns(signature_of(lambda solution_str, **rest: 0.0), VERL, "f") == ()
    )


@pytest.mark.parametrize(
    ("record", "named"),
    [
        ({"prompt": ""}, ("data_source", "ground_truth")),
        (
            {"prompt": "", "data_source": "x", "reward_model": {"style": "rule"}},
            ("ground_truth",),
        ),
        (
            {"prompt": "", "data_source": "x", "reward_model": "rule"},
            ("ground_truth", "reward_model.ground_truth"),
        ),
    ],
)
def test_what_records_lack_for_verls_arguments_is_named(
    record: dict[str, Any], named: tuple[str, ...]
) -> None:
    for name in named:
        with refused(name):
            requested_columns(signature_of(compute_score), record, "f")


def test_a_part_with_a_name_of_ours_is_refused_before_a_run() -> None:
    def reward(response: str) -> dict[str, float]:
        return {"reward": 0.25, "mean": 9.0}

    packed = cloudpickle.dumps(reward)
    with refused("reward part 'mean'", DataError):
        try_rewards([RewardFunction("reward", 1.0, packed, ())], RECORD, 10)
    # f/mean.
    try_rewards(
        [RewardFunction("f", 1.0, packed, ()), RewardFunction("g", 1.0, packed, ())],
        RECORD,
        10,
    )


def test_half_a_character_of_an_environment_stays_in_its_process() -> None:
    class Halves:
        def reset(self, record: dict[str, object]) -> str:
            return "x\ud800"

        def step(self, response: str) -> Observation:
            return Observation("y\ud800", reward=0.0, parts={"z\ud800": 1.0})

    answered = try_environment(cloudpickle.dumps(Halves), RECORD, 5)
    assert (answered.opening, answered.observation) == (
        "x?",
        Observation("y?", reward=0.0, parts={"z?": 1.0}),
    )


REWARDS = """
from functools import cache

limit = 3


def first(completions, **columns):
    return 0.0


async def second(response, answer):
    return 0.0


@cache
def third(completions):
    return 0.0
"""


@pytest.mark.parametrize(
    ("function", "named"),
    [("first", "completions"), ("second", ""), ("third", ""), ("fourth", "no fourth")],
)
def test_the_parameters_of_the_named_function_alone_are_checked(
    function: str, named: str, tmp_path: Path
) -> None:
    file = tmp_path / "rewards.py"
    file.write_text(REWARDS)
    with refused(named) if named else nullcontext():
        check_reward_function("reward.function", f"{file}:{function}")


def test_a_name_is_of_a_file_or_a_module_with_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain" / "inner").mkdir(parents=True)
    (tmp_path / "plain" / "inner" / "part.py").touch()
    (tmp_path / "single.py").touch()
    files = {
        "elsewhere/a.py:reward": Path("elsewhere/a.py"),
        "single:reward": tmp_path / "single.py",
        "plain.inner.part": tmp_path / "plain" / "inner" / "part.py",
        # A folder without __init__.py is a package without a file.
        "plain.inner": None,
        "plain.missing:reward": None,
        "single.part": None,
    }
    assert {name: source_file(name) for name in files} == files
