"""Functions given as objects score like named ones, and settings that stand for them are told from names."""

import threading
from functools import partial
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from controller.config import Config, load
from controller.config.python_rewards import NONE_GIVEN, give_rewards, give_step
from controller.config.sections import RewardConfig, RunConfig
from controller.lifecycle.reward_inputs import reward_functions
from controller.preflight.checks import check
from tests.controller.config_workspace import refusal
from tests.refusals import refused
from workers.user_code.rewards import try_rewards

RECORD = {"prompt": "1+1=", "solution": "2"}
SHARED = {"bonus": 0.25}


def with_bonus(response: str, solution: str) -> float:
    return SHARED["bonus"] + float(response == solution)


class Counting:
    def __init__(self, wanted: int) -> None:
        self.wanted = wanted

    def __call__(self, response: str, **columns: Any) -> float:
        return float(len(response) == self.wanted) + len(columns)


def given_config(workspace: Path, reward: Any) -> tuple[Config, Any]:
    config = load(workspace / "config.yaml")
    return config, give_rewards(config.reward, reward)


def test_a_closure_a_lambda_a_partial_and_an_object_score_in_a_process_of_their_own(
    workspace: Path,
) -> None:
    wanted = 0.5

    def closure(response: str) -> float:
        return wanted

    def scaled(scale: float, response: str) -> float:
        return scale

    rewards = {
        with_bonus: 1.0,
        closure: 10.0,
        lambda response: 1.0: 100.0,
        partial(scaled, 2.0): 1000.0,
    }
    config, given = given_config(workspace, rewards | {Counting(0): 10_000.0})
    check(config, given)
    names = ["with_bonus", "closure", "lambda", "scaled", "Counting"]
    assert (
        list(config.reward.functions)
        == list(given)
        == [f"callable:{name}" for name in names]
    )
    functions, _ = reward_functions(config, RECORD, call_functions=given)
    assert [function.columns for function in functions] == [
        ("solution",),
        (),
        (),
        (),
        ("prompt", "solution"),
    ]
    score = try_rewards(functions, RECORD, 30)  # of an empty response
    assert score.reward == 0.25 + 5.0 + 100.0 + 2000.0 + 30_000.0
    assert score.parts == dict(zip(names, (0.25, 0.5, 1.0, 2.0, 3.0), strict=True))


def test_a_function_is_pickled_by_value_and_its_module_is_left_as_it_was() -> None:
    before = cloudpickle.list_registry_pickle_by_value()
    (packed,) = give_rewards(RewardConfig(), with_bonus).values()
    assert b"bonus" in packed.packed, (
        "the value of the global, not the name of a module to import"
    )
    assert cloudpickle.list_registry_pickle_by_value() == before


def test_the_version_of_a_function_is_that_of_its_code_and_what_it_holds() -> None:
    def closure(scale: float) -> Any:
        return lambda response: scale * len(response)

    def version(function: Any) -> str:
        (found,) = give_rewards(RewardConfig(), function).values()
        return found.version

    def scaled(scale: float, response: str) -> float:
        return scale

    same = [
        (closure(0.5), closure(0.5)),
        (partial(scaled, 1.0), partial(scaled, 1.0)),
        (Counting(1), Counting(1)),
    ]
    assert all(version(one) == version(other) for one, other in same)
    others = [
        closure(0.5),
        closure(0.6),
        partial(scaled, 1.0),
        partial(scaled, 2.0),
        Counting(1),
        Counting(2),
    ]
    others += [
        lambda response: 1.0,
        lambda response: 2.0,
        lambda response: len(response),
        with_bonus,
    ]
    assert len({version(function) for function in others}) == len(others)


def test_a_function_replaces_those_of_the_settings_and_a_name_stays_a_name(
    workspace: Path,
) -> None:
    config, given = given_config(workspace, with_bonus)
    assert (config.reward.function, config.reward.functions) == ("callable:with_bonus", {})
    config, given = given_config(workspace, {"reward.py:reward": 2.0, with_bonus: 1.0})
    assert config.reward.weights == {"reward.py:reward": 2.0, "callable:with_bonus": 1.0}
    check(config, given)
    assert list(given) == ["callable:with_bonus"]
    config, given = given_config(workspace, ["reward.py:reward", with_bonus])
    assert config.reward.weights == {"reward.py:reward": 1.0, "callable:with_bonus": 1.0}
    check(config, given)
    config, given = given_config(workspace, None)
    assert (config.reward.function, given) == ("reward.py:reward", NONE_GIVEN)
    # As a run recorded it.
    assert "ballast.fit(..., reward=...)" in refusal("reward.function=callable:with_bonus")


@pytest.mark.parametrize(
    ("reward", "named"),
    [
        (lambda answer: 1.0, "'response'"),
        (lambda response, nowhere: 1.0, "'nowhere'"),
        (
            (lambda lock: lambda response: 1.0 if lock else 0.0)(threading.Lock()),
            "cannot be sent to other processes",
        ),
        ({(lambda response: 1.0): 1.0, (lambda response: 2.0): 1.0}, "callable:lambda"),
        ([with_bonus, with_bonus], "callable:with_bonus"),
    ],
)
def test_a_function_that_cannot_be_used_is_refused_in_one_line(
    workspace: Path, reward: Any, named: str
) -> None:
    with refused(named):
        config, given = given_config(workspace, reward)
        reward_functions(config, RECORD, call_functions=given)


def test_a_step_is_a_function_or_its_name_or_none() -> None:
    settings = RunConfig()
    assert (give_step(settings, None), settings.step) == (NONE_GIVEN, RunConfig().step)
    assert (give_step(settings, "loops.py:mine"), settings.step) == ({}, "loops.py:mine")
    (name,) = give_step(settings, with_bonus)
    assert name == settings.step == "callable:with_bonus"
    for step in (5, ["loops.py:mine"]):
        with refused("step="):
            give_step(settings, step)
