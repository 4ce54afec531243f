"""Planted defects of judges are named as what they are, and the default judge has none."""

import re
from collections.abc import Callable
from functools import partial

import cloudpickle
import pytest

from ballast.certify.environment.judge_checks import check_judge
from controller.config import load
from workers.config.judge import GRADE
from workers.reward_functions import last_match
from workers.user_code.rewards import RewardFunction

RECORDS = [
    {"prompt": "What is 2 + 3?", "answer": "5"},
    {"prompt": "What is 4 + 4?", "answer": "8"},
]

DEFAULT = partial(last_match, pattern=GRADE)


def first_number(response: str) -> float:
    return float(re.findall(r"\d+", response)[0])


def five_by_default(response: str) -> float:
    match = re.search(r"\[\[(\d+)\]\]$", response)
    return float(match[1]) if match else 5.0


def another_form(response: str) -> float:
    return float(re.findall(r"Style: (\d+)", response)[-1])


def findings_of(parser: Callable[[str], float], prompt: str = "") -> list[str]:
    settings = ["model.path=none", "data.train=none", "reward.judge.model=policy"]
    config = load(None, [*settings, *([f"reward.judge.prompt={prompt}"] if prompt else [])])
    function = RewardFunction("parser", 1.0, cloudpickle.dumps(parser), ())
    return [finding.name for finding in check_judge(config, function, RECORDS)]


@pytest.mark.parametrize(
    ("name", "parser", "prompt"),
    [
        ("judge.wrong_grade", first_number, ""),
        ("judge.grade_from_nothing", five_by_default, ""),
        ("judge.question_without_record", DEFAULT, "Grade from 1 to 10 {{ response }}"),
    ],
)
def test_a_planted_defect_is_named_alone(
    name: str, parser: Callable[[str], float], prompt: str
) -> None:
    assert findings_of(parser, prompt) == [name]


@pytest.mark.parametrize("parser", [DEFAULT, another_form])
def test_a_clean_judge_has_no_finding(parser: Callable[[str], float]) -> None:
    assert findings_of(parser) == []
