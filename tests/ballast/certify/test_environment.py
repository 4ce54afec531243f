"""Planted defects of environments are named as what they are, and clean environments have none."""

import asyncio
from pathlib import Path
from typing import Any

import cloudpickle
import pytest

from ballast.certify.environment.checks import TriedEnvironment, check_environment
from ballast.certify.environment.play import Rules
from ballast.certify.environment.solutions import check_solutions
from ballast.certify.findings import Level
from ballast.certify.subject import read_subject
from controller.config import load
from examples.calculator.environment import Calculator
from tests.ballast.certify import planted_environments as planted
from tests.workers.harbor.test_harbor import write_task
from tests.workers.sandbox.conftest import needs_bubblewrap

RECORDS = [
    {"prompt": f"{a}+{a * 7}=", "answer": a * 8, "level": a % 3, "seed": a}
    for a in range(101, 160, 9)
]
PLANTED = {
    "environment.observation_holds_answer": [
        planted.TellsTheAnswer,
        planted.OpensWithTheAnswer,
    ],
    "environment.raises": [planted.RaisesOnWords],
    "environment.ends_process": [planted.Exits],
    "environment.hangs": [planted.Hangs],
    "environment.wrong_answer_type": [planted.ReturnsATuple],
    "environment.reward_not_finite": [planted.NotFinite],
    "environment.episodes_do_not_end": [planted.NeverDone],
    "environment.reset_differs": [planted.RandomReset],
    "environment.steps_differ": [planted.RandomStep],
    "environment.state_left_behind": [planted.CountsInTheClass],
    "environment.episodes_share_state": [planted.SharesAFile],
    "environment.pays_everything": [planted.PaysEverything],
    "environment.pays_without_an_answer": [planted.PaysTheEmptyTurn],
    "environment.pays_another_answer": [planted.PaysAnyNumber],
    "environment.oracle_does_not_win": [planted.PaysTheOpposite],
    "environment.observation_too_long": [planted.TooLong],
}


def findings_of(
    environment: type, records: list[dict[str, Any]], timeout_s: float = 1.0
) -> dict[str, str]:
    """Names and levels of what is found."""
    tried = TriedEnvironment(
        cloudpickle.dumps(environment),
        "rollout.environment=mine.py:Mine",
        Rules("prompt", max_turns=4),
        answer_key="answer",
        timeout_s=timeout_s,
        max_new_tokens=16,
        max_tokens=64,
    )
    findings, _ = asyncio.run(check_environment(tried, records))
    assert all(isinstance(finding.level, Level) for finding in findings)
    return {finding.name: finding.level for finding in findings}


@pytest.mark.parametrize(
    ("name", "environment"),
    [(name, environment) for name, classes in PLANTED.items() for environment in classes],
)
def test_a_planted_defect_is_named_alone(name: str, environment: type) -> None:
    unseeded = [
        {key: value for key, value in record.items() if key != "seed"} for record in RECORDS
    ]
    assert list(findings_of(environment, unseeded[:3])) == [name]


def test_a_seed_that_nothing_reads_is_named() -> None:
    assert findings_of(planted.SeedIsNotRead, RECORDS[:2]) == {
        "environment.seed_not_read": "likely"
    }


@pytest.mark.parametrize("environment", [planted.Sums, Calculator])
def test_a_clean_environment_has_no_finding(environment: type) -> None:
    unseeded = [
        {"prompt": record["prompt"], "answer": record["answer"]} for record in RECORDS
    ]
    assert findings_of(environment, unseeded) == {}


@needs_bubblewrap
def test_solutions_of_tasks_are_paid_in_full_and_empty_answers_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BALLAST_SANDBOX", "")
    image = "FROM ubuntu\nWORKDIR /app\n"
    reward = "> /logs/verifier/reward.txt\n"
    made = f"[ -f made ] && echo 1 {reward}[ -f made ] || echo 0 {reward}"
    tasks = {
        "good": (made, "touch made\n"),
        "half": (
            f"[ -f made ] && echo 0.5 {reward}[ -f made ] || echo 0 {reward}",
            "touch made\n",
        ),
        "unpaid": (made, "true\n"),
        "broken": (f"[ -f made ] && exit 1\necho 0 {reward}", "touch made\n"),
        "free": (f"echo 1 {reward}", "true\n"),
    }
    for name, (tests, solution) in tasks.items():
        write_task(tmp_path / name, image, tests, solution)
    settings = [
        "model.path=x",
        f"data.train=harbor:{tmp_path}",
        f"rollout.environment=harbor:{tmp_path}",
    ]
    settings += [
        "rollout.sandbox.kind=bubblewrap",
        "rollout.sandbox.memory_gib=0.25",
        "reward.function=",
    ]
    subject = read_subject(load(None, settings), "tasks")
    target = TriedEnvironment(
        subject.environment, "rollout.environment", Rules("prompt", 4), "", 20.0, 16, 64
    )
    findings, count = asyncio.run(check_solutions(target, subject.records))
    names = {
        (finding.name.removeprefix("environment."), finding.place[-1])
        for finding in findings
    }
    assert count == 5 and names == {
        ("solution_fails", "1"),  # broken, free, good, half, unpaid
        ("empty_answer_is_paid", "2"),
        ("solution_is_not_paid", "4"),
        ("solution_is_not_paid", "5"),
        ("empty_answer_is_paid", "5"),
    }


def test_an_environment_without_a_solution_has_no_findings_of_it() -> None:
    target = TriedEnvironment(
        cloudpickle.dumps(planted.PaysEverything),
        "mine",
        Rules("prompt", 4),
        "answer",
        5.0,
        16,
        64,
    )
    assert asyncio.run(check_solutions(target, RECORDS[:1])) == ([], 0)
