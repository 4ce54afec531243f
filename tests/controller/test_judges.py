"""Judges of runs on stand-ins: who is asked what, and what becomes of the answers. Each response is one
digit.
"""

import re
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from controller.actors.judge import DROPPED, UNPARSED
from controller.actors.layout import pools, role_requests
from controller.config import load_as
from controller.config.sampler import GenerateConfig
from controller.observability.run_folder import RunFolder
from controller.preflight.checks import check_sampler
from examples.addition.warm_start import tokenizer
from tests.controller.sampling.test_on_gpus import generate
from tests.controller.stand_ins.gpus import StandInReward, World
from tests.controller.stand_ins.run import SETTINGS, StandInRun
from tests.json_lines import read_lines
from tests.refusals import refused
from workers.batch.remote_batch import RemoteBatch
from workers.batch.score import Score
from workers.errors import WorkerError

CHARACTERS = tokenizer()
Run = Callable[..., StandInRun]
END = CHARACTERS.eos_token_id
NO_GRADE = CHARACTERS.convert_tokens_to_ids("=")
JUDGE = (
    "data.validation=",
    "reward.judge.max_prompt_tokens=99",
    "reward.judge.sampling.max_new_tokens=8",
)
GRADED = (
    *JUDGE,
    "reward.judge.min_grade=0",
    "reward.judge.max_grade=9",
    "reward.judge.prompt='{{ response }}'",
)
COMPARED = (
    *JUDGE,
    "reward.judge.form=pairwise",
    "reward.judge.prompt='{{ response_a }}{{ response_b }}'",
)
FOUR = ("rollout.samples_per_prompt=4", "reward.judge.opponents=2")


def digits(ids: Sequence[int]) -> list[int]:
    return [int(found) for found in re.findall(r"\d", CHARACTERS.decode(ids))]


@pytest.fixture(autouse=True)
def judging(monkeypatch: pytest.MonkeyPatch, stand_ins: Any) -> Counter[str]:
    """Policies write one digit, and the text of an end token. Judges repeat a response, but not a 3, and of
    two they prefer the larger number.

    Reward workers give the digit in hundreds. Returns who was asked how often.
    """
    world: World = stand_ins.world
    asked: Counter[str] = Counter()

    def answer(seed: int) -> tuple[list[int], str]:
        if "+" in CHARACTERS.decode(world.prompt):
            return [CHARACTERS.convert_tokens_to_ids(str(seed % 5)), END], "stop"
        assert END not in world.prompt, "a response has ended the judge's turn"
        asked[world.actor] += 1
        found = digits(world.prompt)
        verdict = found[0] if len(found) == 1 else int(found[0] > found[1])
        return [
            NO_GRADE if verdict == 3 else CHARACTERS.convert_tokens_to_ids(str(verdict))
        ], "stop"

    def score(self: StandInReward, block: Any, requests: Sequence[Any]) -> list[Score]:
        texts = [
            CHARACTERS.decode(block.row(each.row)["input_ids"][each.prompt_tokens :])
            for each in requests
        ]
        return [
            (
                Score(float(text), text, {"sure": 1.0})
                if text != "="
                else Score(0.0, text, failure="no grade")
            )
            if self.parses
            else Score(int(text[0]) / 100, text)
            for text in texts
        ]

    def begin(self: StandInReward, functions: Any, tokenizer_path: str, **_: Any) -> None:
        self.parses = any(function.name == "parser" for function in functions)

    world.answer = answer
    monkeypatch.setattr(StandInReward, "__init__", begin)
    monkeypatch.setattr(StandInReward, "score", score)
    return asked


def groups(batch: RemoteBatch) -> dict[str, list[tuple[float, float]]]:
    """The digit and the judgement of each sample, by prompt. Rewards are a hundredth of one and the other."""
    found: dict[str, list[tuple[float, float]]] = {}
    for row, ids in enumerate(
        batch.gather().row(i)["input_ids"] for i in range(len(batch))
    ):
        digit = digits(ids[batch["prompt_tokens"][row] :])[0]
        found.setdefault(batch["uid"][row], []).append(
            (digit, round(batch["reward"][row] - digit / 100, 6))
        )
    return found


def test_a_judge_on_engines_of_its_own_grades_each_response(
    run_on_stand_ins: Run, batches: list[RemoteBatch], judging: Counter[str]
) -> None:
    options = (
        "reward.judge.samples=2",
        "reward.judge.sampling.temperature=0.5",
        "reward.judge.weight=2",
    )
    found = run_on_stand_ins(
        "reward.judge.model=model", "reward.judge.replicas=2", *options, *GRADED, *FOUR[:1]
    )
    assert [pool.name for pool in pools(found.config)] == ["training", "judge"]
    samples = [
        sample for batch in batches for group in groups(batch).values() for sample in group
    ]
    expected = [
        (digit, round(2 * digit / 9, 6) if digit != 3 else -0.03) for digit, _ in samples
    ]
    assert samples == expected
    assert sum(judging.values()) == 32 and set(judging) == {"judge 0", "judge 1"}
    lost = sum(digit == 3 for digit, _ in samples)
    assert 0 < lost < len(samples)
    for name, count in {"answers": 32, "unparsed": 2 * lost, "dropped": 0}.items():
        assert sum(step[f"judge/{name}"] for step in found.outcome.steps) == count
    assert sum(step["reward/failures"] for step in found.outcome.steps) == lost
    kind = f"judge's answers without a grade: {2 * lost}"
    assert (
        sum(line.count(kind) for line in found.said)
        <= 1
        <= sum("the answer ends with '='" in x for x in found.said)
    )
    rows = [
        row
        for row in RunFolder(found.config.run_folder).failures
        if row["kind"] == UNPARSED
    ]
    assert sum(row["count"] for row in rows) == 2 * lost and len(rows) == len(
        {row["step"] for row in rows}
    )
    recorded = read_lines(found.config.run_folder / "samples.jsonl")
    assert {(row["response"][0], row["judgement"]) for row in recorded} <= {
        ("3", "="),
        *((c, c) for c in "0124"),
    }
    assert all(
        step["reward/judge/sure"] == 1 and step["judge/tokens"] > 0
        for step in found.outcome.steps
    )


@pytest.mark.parametrize("rule", ["drop", "stop"])
def test_a_sample_without_a_grade_is_left_out_or_stops_the_run(
    run_on_stand_ins: Run, batches: list[RemoteBatch], rule: str
) -> None:
    options = ("reward.judge.model=model", f"reward.on_failure={rule}", *GRADED, *FOUR[:1])
    if rule == "stop":
        with refused("reward.on_failure", WorkerError):
            run_on_stand_ins(*options)
        return
    found = run_on_stand_ins(*options)
    assert (
        sum(step["reward/failures"] for step in found.outcome.steps)
        == 16 - sum(map(len, batches))
        > 0
    )
    assert 3 not in {
        digit for batch in batches for group in groups(batch).values() for digit, _ in group
    }


ASYNCHRONOUS = ("rollout.max_staleness=1", "rollout.placement=apart")


@pytest.mark.parametrize("ahead", [(), ASYNCHRONOUS], ids=["rounds", "ahead"])
@pytest.mark.parametrize("model", ["policy", "model"])
def test_each_response_meets_the_next_ones_of_its_group_in_both_places(
    run_on_stand_ins: Run,
    batches: list[RemoteBatch],
    judging: Counter[str],
    model: str,
    ahead: tuple[str, ...],
) -> None:
    found = run_on_stand_ins(f"reward.judge.model={model}", *COMPARED, *FOUR, *ahead)
    assert [request.role for request in role_requests(found.config)].count("judge") == (
        model == "model"
    )
    assert set(judging) == {"rollout 0" if model == "policy" else "judge 0"}
    assert all(len(batch) == 8 for batch in batches)
    for group in [group for batch in batches for group in groups(batch).values()]:
        numbers = [digit for digit, _ in group]
        for i, (digit, judged) in enumerate(group):
            as_a = [digit > numbers[(i + d) % 4] for d in (1, 2)]
            as_b = [not numbers[i - d] > digit for d in (1, 2)]  # a tie is the second's
            assert judged == sum(as_a + as_b) / 4
    assert sum(step["judge/answers"] for step in found.outcome.steps) >= 32


def test_a_question_that_is_too_long_or_given_up_has_no_grade(
    run_on_stand_ins: Run, stand_ins: Any
) -> None:
    long = (
        "reward.judge.prompt='{{ prompt }}{{ response }}'",
        "reward.judge.max_prompt_tokens=2",
    )
    found = run_on_stand_ins("reward.judge.model=model", *GRADED, *long)
    assert all(
        step["reward/failures"] == 4 and step["judge/answers"] == 0
        for step in found.outcome.steps
    )
    assert "reward.judge.max_prompt_tokens" in "".join(found.said)

    def refuse(who: str, does: str) -> None:
        if who == "judge 0" and does == "generate":
            raise ValueError("no memory")

    stand_ins.world.trouble = refuse
    found = run_on_stand_ins("reward.judge.model=model", *GRADED, "run.name=refused")
    assert all(
        step["judge/dropped"] == 4 == step["reward/failures"]
        for step in found.outcome.steps
    )
    rows = [
        row for row in RunFolder(found.config.run_folder).failures if row["kind"] == DROPPED
    ]
    assert [row["count"] for row in rows] == [4] * len(found.outcome.steps)
    assert all(
        re.fullmatch(r"prompt \d+, sample \d+: .*no memory.*", row["first"]) for row in rows
    )


def test_generated_samples_are_judged_too_and_comparisons_are_refused(
    tmp_path: Any, judging: Counter[str]
) -> None:
    lines = generate(tmp_path, "reward.judge.model=model", *GRADED[1:])
    assert {line["parts"].get("judge") for line in lines} <= {
        None,
        *(i / 9 for i in (0, 1, 2, 4)),
    }
    assert judging["judge 0"] == len(lines) == 16
    with refused("reward.judge.form"):
        check_sampler(
            load_as(
                GenerateConfig, None, [*SETTINGS, "reward.judge.model=model", *COMPARED[1:]]
            )
        )
