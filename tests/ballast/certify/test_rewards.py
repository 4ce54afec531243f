"""Every planted defect of a reward is named as what it is, and a right reward has no finding."""

import json
from pathlib import Path

import pytest

from ballast.certify.behaviour_checks import check_behaviour, check_times
from ballast.certify.certificate import Certificate
from ballast.certify.findings import Level
from ballast.certify.reward_checks import check_reward
from ballast.certify.subject import Subject, make_config, read_subject
from tests.ballast.certify.planted_rewards import FAILING, HACKED, MISBEHAVING, RIGHT


def subject_of(folder: Path, source: str, records: int = 40) -> Subject:
    (folder / "reward.py").write_text(source)
    lines = [
        json.dumps({"prompt": f"How much is {n} + {7 * n}?", "answer": str(8 * n)})
        for n in range(1, records)
    ]
    (folder / "data.jsonl").write_text("\n".join(lines))
    overrides = ["reward.timeout_s=2", "rollout.sampling.max_new_tokens=500"]
    reward = f"{folder}/reward.py:reward"
    return read_subject(
        make_config(None, "", reward, str(folder / "data.jsonl"), overrides), reward
    )


def names_of(certificate: Certificate) -> list[str]:
    return [
        finding.name for finding in certificate.findings if finding.level is not Level.NOTE
    ]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("name", HACKED | FAILING)
def test_the_panel_names_a_planted_defect(name: str, tmp_path: Path) -> None:
    certificate = Certificate("planted", "quick")
    check_reward(subject_of(tmp_path, (HACKED | FAILING)[name]), certificate)
    assert name.partition(",")[0] in names_of(certificate)


@pytest.mark.drawn(3)
@pytest.mark.parametrize("name", MISBEHAVING)
def test_repeated_calls_name_a_planted_defect(name: str, tmp_path: Path) -> None:
    certificate = Certificate("planted", "quick")
    check_behaviour(subject_of(tmp_path, MISBEHAVING[name]), certificate)
    assert names_of(certificate) == [name]


def test_slow_calls_are_named() -> None:
    certificate = Certificate("planted", "quick")
    check_times(certificate, [2.0] * 10, "reward.py:reward")
    assert names_of(certificate) == ["reward.slow"]
    assert certificate.tables["reward milliseconds"][0]["p50"] == 2000


def test_a_right_reward_has_no_finding(tmp_path: Path) -> None:
    certificate = Certificate("right", "quick")
    subject = subject_of(tmp_path, RIGHT)
    check_reward(subject, certificate)
    check_behaviour(subject, certificate)
    assert names_of(certificate) == []
    panel = {row["policy"]: row["mean"] for row in certificate.tables["reward panel"]}
    assert panel["oracle"] == 1.0
    assert panel["oracle of another record"] == 0.0
