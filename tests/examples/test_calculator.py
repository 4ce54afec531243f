import json
import random
from pathlib import Path

import pytest

from controller.offline.examples import Example
from controller.offline.tokenized import example_row
from examples.calculator import data
from examples.calculator.environment import Calculator
from examples.calculator.warm_start import characters, conversation, episode
from workers.environment import Observation
from workers.rendering import Renderer

RECORD = {"prompt": "738+956=", "answer": 1694}


def play(*responses: str) -> list[Observation]:
    environment = Calculator()
    environment.reset(RECORD)
    return [environment.step(response) for response in responses]


def test_the_calculator_answers_and_then_the_answer_is_graded() -> None:
    asked, answered = play("[738+956]", "1694")
    assert (asked.text, asked.reward, asked.done) == ("<1694>", 0.0, False)
    assert (answered.reward, answered.done) == (1.0, True)
    assert answered.parts == {"exact_match": 1.0, "asked_rightly": 1.0}


@pytest.mark.parametrize(
    ("responses", "reward", "asked_rightly"),
    [
        (["1694"], 1, 0),
        (["1693"], 0, 0),
        (["[738+957]", "1694"], 1, 0),
        (["[738+956]", "1693"], 0, 1),
        (["[7+"], 0, 0),
    ],
)
def test_only_the_answer_counts_and_a_wrong_question_is_told_apart(
    responses: list[str], reward: float, asked_rightly: float
) -> None:
    last = play(*responses)[-1]
    assert (last.reward, last.parts["asked_rightly"], last.done) == (
        reward,
        asked_rightly,
        True,
    )


def test_the_warm_start_learns_the_policys_turns_alone() -> None:
    rng = random.Random(3)
    asking = next(
        parts for parts in iter(lambda: episode(rng, asks=0.5), None) if len(parts) > 2
    )
    assert [text[0] for text, _ in asking[1:3]] == ["[", "<"]
    tokens = characters()
    row = example_row(
        Renderer(tokens), Example([], conversation(asking)["messages"]), "record 1"
    )
    assert tokens.decode(row["input_ids"]) == "".join(
        text + "<eos>" * own for text, own in asking
    )
    learned = tokens.decode(row["input_ids"][row["loss_mask"]])
    assert learned == "".join(text + "<eos>" for text, own in asking if own)


def test_held_out_problems_are_never_trained_on(tmp_path: Path) -> None:
    for name, held_out in (("train", False), ("validation", True)):
        data.write(tmp_path / name, 300, seed=0, held_out=held_out)
    sets = [
        {json.loads(line)["prompt"] for line in (tmp_path / name).open()}
        for name in ("train", "validation")
    ]
    assert not sets[0] & sets[1]
