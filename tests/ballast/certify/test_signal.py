"""Signal of groups against values counted over all subsets, and what a policy cannot express."""

import json
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ballast.certify.certificate import Certificate
from ballast.certify.signal import (
    Group,
    Signal,
    check_signal,
    group_lines,
    recommended_rows,
    signal_findings,
    write_difficulty,
)
from ballast.certify.small_policy import NoPolicyError, find_policy
from ballast.certify.subject import make_config, read_subject
from examples.addition.warm_start import create_model


def group(rewards: list[float], number: int = 1, lengths: tuple[int, ...] = ()) -> Group:
    right = sum(reward >= 1 for reward in rewards)
    return Group(number, rewards, right, lengths or (5,) * len(rewards), cut=0)


@given(
    st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=4, max_size=8), st.integers(2, 4)
)
def test_the_share_with_signal_is_the_mean_over_all_subsets(
    rewards: list[float], samples: int
) -> None:
    subsets = [len(set(subset)) > 1 for subset in combinations(rewards, samples)]
    assert group(rewards).signal(samples) == pytest.approx(sum(subsets) / len(subsets))


@given(st.integers(0, 8), st.integers(1, 8))
def test_pass_at_k_is_the_mean_over_all_subsets(right: int, k: int) -> None:
    rewards = [1.0] * right + [0.0] * (8 - right)
    subsets = [max(subset) for subset in combinations(rewards, k)]
    assert Signal([group(rewards)]).pass_at(k) == pytest.approx(sum(subsets) / len(subsets))


@pytest.mark.parametrize(
    ("rights", "samples"),
    [
        ([8] * 4, 5),  # half right: 5 samples differ in 97 % of the groups, and 9 in all
        # One in sixteen: the share is a straight line, where any n is as good.
        ([1] * 4, 2),
        ([0] * 4, 2),  # nothing to gain
    ],
)
def test_samples_per_prompt_lie_at_the_knee(rights: list[int], samples: int) -> None:
    signal = Signal([group([1.0] * right + [0.0] * (16 - right)) for right in rights])
    assert signal.best_samples == samples


def line(
    uid: int, reward: float, tokens: int, reason: str = "stop", **more: Any
) -> dict[str, Any]:
    facts = {"uid": str(uid), "reward": reward, "parts": {"exact": reward / 2}}
    return {**facts, "response_tokens": tokens, "finish_reason": reason, **more}


def test_lines_become_groups_by_record_without_failed_rewards() -> None:
    lines = [
        line(0, 1.0, 9),
        line(0, 0.0, 30, "length"),
        line(0, 0.0, 3, failure="raised"),
        line(1, 2.0, 4),
    ]
    lines.append(line(1, 0.5, 6))
    first, second = group_lines(lines, [7, 9], "reward", 1.0).groups
    assert (first.number, second.number) == (7, 9)
    assert (first.rewards, first.right, first.lengths, first.cut) == ([1.0, 0.0], 1, [9], 1)
    assert (second.right, second.lengths, second.cut) == (1, [4, 6], 0)
    of_part = group_lines(lines, [7, 9], "exact", 1.0).groups
    assert [group.right for group in of_part] == [0, 1]


def test_hard_easy_and_cut_records_are_named() -> None:
    easy = [group([1.0] * 4, number) for number in range(1, 4)]
    hard = [group([0.0] * 4, number) for number in range(1, 4)]
    some = group([0.0, 1.0, 0.0, 1.0], 9)
    cut = Group(4, [0.0, 1.0], 1, [7], cut=1)
    names = [[finding.name for finding in signal_findings(Signal(groups), "m", 32)] for groups in (
        [*easy, some], [*hard, some], [cut], [some],
    )]  # fmt: skip
    assert names == [["signal.too_easy"], ["signal.too_hard"], ["signal.responses_cut"], []]


def test_the_cap_holds_nearly_all_that_finish() -> None:
    signal = Signal([group([0.0, 1.0], lengths=tuple(range(1, 101)))])
    assert signal.cap == 100
    values = {row["what"]: row["value"] for row in recommended_rows(signal)}
    assert values["rollout.sampling.max_new_tokens"] == 100


def test_a_difficulty_is_written_next_to_the_data(tmp_path: Path) -> None:
    data = tmp_path / "train.jsonl"
    data.write_text("")
    records = [{"prompt": "1+1=", "answer": 2}, {"prompt": "2+2=", "answer": 4}]
    subject: Any = SimpleNamespace(train={str(data): records}, records=records)
    file = write_difficulty(subject, Signal([group([1.0, 0.0, 0.0, 0.0], number=2)]))
    assert file == tmp_path / "train.difficulty.jsonl"
    assert json.loads(file.read_text()) == {
        "prompt": "2+2=",
        "answer": 4,
        "difficulty": 0.75,
    }


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("tiny")
    create_model(folder, 0, width=32, layers=1)
    return str(folder)


def subject_of(tmp_path: Path, prompts: list[Any], model: str) -> Any:
    data = tmp_path / "data.jsonl"
    data.write_text(
        "".join(json.dumps({"prompt": prompt, "answer": "5"}) + "\n" for prompt in prompts)
    )
    config = make_config(None, "", "examples/gsm8k/reward.py:reward", str(data))
    return replace(read_subject(config, "mine"), model=model)


@pytest.mark.parametrize(
    ("prompts", "reason"),
    [
        (
            ["How many?"] * 9,
            "has 'howmany?' in its prompt, which the model's vocabulary lacks",
        ),
        ([[{"role": "user", "content": "1+1"}]] * 9, "the model has no chat template"),
        (["1+1="] * 3, "there are only 3"),
    ],
)
def test_records_that_a_vocabulary_cannot_express_are_refused_with_the_reason(
    prompts: list[Any], reason: str, model: str, tmp_path: Path
) -> None:
    subject = subject_of(tmp_path, prompts, model)
    with pytest.raises(NoPolicyError) as refusal:
        find_policy(subject)
    assert reason in str(refusal.value)
    certificate = Certificate("mine", "default")
    check_signal(subject, certificate)
    assert certificate.skipped["signal"] == str(refusal.value) and not certificate.findings


def test_other_records_are_left_out_and_named(model: str, tmp_path: Path) -> None:
    prompts = ["1+1=", "a+b=", *(f"{n}+1=" for n in range(8))]
    policy = find_policy(subject_of(tmp_path, prompts, model))
    assert policy.numbers == [1, *range(3, 11)]
    assert policy.unexpressed.startswith("record 2 has 'ab'")
