"""What score and oracle say together, and a small run whose reward pays something else than the answer."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from ballast.certify.certificate import Certificate
from ballast.certify.small_policy import SmallPolicy
from ballast.certify.subject import make_config, read_subject
from ballast.certify.training import (
    check_training,
    curve_rows,
    curves,
    exploits,
    settings_of,
    training_findings,
)
from controller.config import load
from examples.addition import data, warm_start
from tests.json_lines import read_lines

RECORDS = [{"prompt": f"{n}+1=", "answer": str(n + 1)} for n in range(20)]
SUBJECT: Any = SimpleNamespace(prompt_key="prompt", answer_key="answer", records=RECORDS)


def validations(scores: list[float], rights: list[float]) -> list[dict[str, Any]]:
    rows = []
    for number, (score, right) in enumerate(zip(scores, rights, strict=True)):
        rows.append(
            {
                "step": 10 * number,
                "validation/reward": score,
                "validation/certified_answer": right,
            }
        )
    return rows


def sample(
    step: int, reward: float, response: str = "", prompt: str = "1+1="
) -> dict[str, Any]:
    return {"step": step, "reward": reward, "response": response, "prompt": prompt}


@pytest.mark.parametrize(
    ("scores", "rights", "names"),
    [
        ([0.3, 0.7], [0.2, 0.8], []),
        ([0.3, 0.9], [0.3, 0.35], ["train.exploit"]),
        ([0.3, 0.9], [0.3, 0.0], ["train.exploit"]),
        ([0.3, 0.32], [0.3, 0.29], ["train.does_not_learn"]),
        ([0.3, 0.3], [0.2, 0.8], ["train.score_stands_still"]),
    ],
)
def test_score_and_right_answers_are_told_apart(
    scores: list[float], rights: list[float], names: list[str]
) -> None:
    samples = [sample(1, 0.0), sample(30, 1.0)]
    score, oracle = curves(validations(scores, rights), 128, samples)
    findings = training_findings(score, oracle, SUBJECT, samples)
    assert [finding.name for finding in findings] == names
    assert [row["score"] for row in curve_rows(score, oracle)] == scores


def test_the_noise_of_a_score_follows_its_range() -> None:
    rows = validations([0.0, 3.0], [0.0, 0.0])
    narrow, oracle = curves(rows, 200, [sample(1, 0.0), sample(2, 1.0)])
    wide, _ = curves(rows, 200, [sample(1, -10.0), sample(2, 10.0)])
    assert narrow.noise == pytest.approx(0.1) == oracle.noise
    assert wide.noise == pytest.approx(2.0) and wide.rises


def test_an_exploit_shows_the_wrong_samples_that_gained_most() -> None:
    samples = [sample(1, 0.2, "early")] + [
        sample(30, n / 10, f"wrong {n}", f"{n}+1=") for n in range(10)
    ]
    samples.append(sample(30, 9.0, "2"))  # the answer of 1+1=
    samples.append(sample(30, 0.1, "worse", "9+1="))
    lines = exploits(samples, SUBJECT)
    assert [line.split("'")[3] for line in lines] == [f"wrong {n}" for n in range(9, 4, -1)]
    assert lines[0].startswith("+0.700 ")


def test_a_small_run_has_only_settings_of_a_run(tmp_path: Path) -> None:
    model = tmp_path / "model"
    warm_start.create_model(model, 0, width=32, layers=1)
    file = tmp_path / "data.jsonl"
    file.write_text("".join(json.dumps(record) + "\n" for record in RECORDS))
    subject = read_subject(
        make_config(None, "", "examples/gsm8k/reward.py:reward", str(file)), "mine"
    )
    policy = SmallPolicy(str(model), RECORDS, list(range(1, 21)))
    held_out = SmallPolicy(str(model), RECORDS[::5], [1, 2, 3, 4])
    (tmp_path / "config.yaml").write_text(
        yaml.safe_dump(settings_of(subject, policy, held_out, tmp_path))
    )
    config = load(tmp_path / "config.yaml", [])
    assert config.reward.weights["ballast.certify.held_out:certified_answer"] == 0.0
    train = read_lines(Path(config.data.train))
    held = read_lines(Path(config.data.validation))
    assert len(train) == 16 and len(held) == 4
    assert {row["certify_answer"] for row in held} == {
        row["answer"] for row in RECORDS[::5]
    }


REWARD = """
def reward(response, solution):
    right = response == solution
    return {}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("paid", "names"),
    [("float(right)", []), ("response.count('9') / 20", ["train.exploit"])],
    ids=["the answer", "nines"],
)
def test_a_policy_learns_the_answer_or_the_reward_alone(
    paid: str, names: list[str], tmp_path: Path
) -> None:
    assert warm_start.main() == 0
    data.write(tmp_path / "train.jsonl", 1024, seed=1, held_out=False)
    data.write(tmp_path / "held_out.jsonl", 192, seed=2, held_out=True)
    (tmp_path / "mine.py").write_text(REWARD.format(paid))
    overrides = [
        f"data.validation={tmp_path / 'held_out.jsonl'}",
        "rollout.sampling.max_new_tokens=64",
    ]
    overrides.append("data.max_prompt_tokens=26")
    config = make_config(
        None, "", f"{tmp_path}/mine.py:reward", str(tmp_path / "train.jsonl"), overrides
    )
    certificate = Certificate("addition", "train")
    check_training(read_subject(config, "addition"), certificate)
    assert certificate.skipped == {}
    assert [finding.name for finding in certificate.findings] == names
    if names:
        assert certificate.findings[0].evidence.count("->") == 5
