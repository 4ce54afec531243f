"""Every planted defect of a data set is named as what it is, and clean data have no finding."""

import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ballast.certify.certificate import Certificate
from ballast.certify.data_checks import check_data
from ballast.certify.findings import Level
from ballast.certify.prompt_checks import check_prompts
from ballast.certify.subject import make_config, read_subject

Rows = list[dict[str, Any]]
FIRST = ("riv", "sto", "gard", "lan", "mar", "vel", "zeb")
WORDS = [
    first + last
    for first in FIRST
    for last in ("er", "ne", "en", "tern", "ket", "sil", "bo", "dra", "fal")
]


def clean_rows(seed: int, count: int = 120) -> Rows:
    draw = random.Random(seed)
    rows = []
    for _ in range(count):
        story = " ".join(draw.sample(WORDS, 14))
        first, second = draw.randrange(100, 999), draw.randrange(100, 999)
        prompt = f"A tale of {story}: {first} coins and {second} coins. How many coins?"
        rows.append({"prompt": prompt, "answer": str(first + second)})
    return rows


def repeat_rows(train: Rows, held_out: Rows) -> None:
    train[50:56] = [dict(row) for row in train[:6]]


def repeat_in_capitals(train: Rows, held_out: Rows) -> None:
    train[50:56] = [row | {"prompt": row["prompt"].upper() + "  "} for row in train[:6]]


def change_an_answer(train: Rows, held_out: Rows) -> None:
    train[50] = train[0] | {"answer": "7"}


def leak_validation(train: Rows, held_out: Rows) -> None:
    held_out[3:8] = [dict(row) for row in train[10:15]]


def change_a_word(train: Rows, held_out: Rows) -> None:
    for place in range(6):
        train[60 + place] = train[place] | {
            "prompt": train[place]["prompt"].replace("tale", "story", 1)
        }


def change_a_word_of_validation(train: Rows, held_out: Rows) -> None:
    held_out[5] = train[9] | {
        "prompt": train[9]["prompt"].replace("How many", "What number of")
    }


def empty_prompt(train: Rows, held_out: Rows) -> None:
    train[7]["prompt"] = " "


def drop_prompt(train: Rows, held_out: Rows) -> None:
    del train[7]["prompt"]


def cut_with_dots(train: Rows, held_out: Rows) -> None:
    train[7]["prompt"] = train[7]["prompt"][:60] + "…"


def cut_at_a_length(train: Rows, held_out: Rows) -> None:
    for row in train[:5]:
        row["prompt"] = (row["prompt"] * 5)[:512]


def cut_within_a_sentence(train: Rows, held_out: Rows) -> None:
    train[7]["prompt"] = train[7]["prompt"][:50].rstrip(" :")


def overlong(train: Rows, held_out: Rows) -> None:
    train[7]["prompt"] = "word " * 100_000 + "?"


def name_the_answer(train: Rows, held_out: Rows) -> None:
    for row in train[:5]:
        row["prompt"] += f" (Answer: {row['answer']})"


def show_the_solution(train: Rows, held_out: Rows) -> None:
    for row in train:
        row["answer"] = f"The sum of both is {row['answer']} coins in all"
    train[4]["prompt"] += f" {train[4]['answer']}."


def lose_an_answer(train: Rows, held_out: Rows) -> None:
    train[7]["answer"] = ""


def mix_types(train: Rows, held_out: Rows) -> None:
    train[7]["answer"] = int(train[7]["answer"])


def lose_a_column(train: Rows, held_out: Rows) -> None:
    del train[7]["answer"]


def add_weights(train: Rows, held_out: Rows) -> None:
    for row in train:
        row["weight"] = 0.5


def add_a_conversation(train: Rows, held_out: Rows) -> None:
    for row in train:
        row["conversations"] = [{"from": "human", "value": row["prompt"]}]


def as_messages(rows: Rows, **fields: Any) -> None:
    for row in rows:
        row["prompt"] = [{"role": "user", "content": row["prompt"]} | fields]


def mark_untrained(train: Rows, held_out: Rows) -> None:
    as_messages(train, train=False)


def speak_as_a_narrator(train: Rows, held_out: Rows) -> None:
    as_messages(train, role="narrator")


def leave_the_response(train: Rows, held_out: Rows) -> None:
    as_messages(train)
    train[7]["prompt"].append({"role": "assistant", "content": "I will not say."})


def break_arguments(train: Rows, held_out: Rows) -> None:
    as_messages(train)
    call = {"type": "function", "function": {"name": "add", "arguments": "a=1, b=2"}}
    train[7]["prompt"][:0] = [{"role": "assistant", "content": "", "tool_calls": [call]}]


def rename_the_answer(train: Rows, held_out: Rows) -> None:
    for row in [*train, *held_out]:
        row["solution"] = row.pop("answer")


PLANTED: dict[Callable[[Rows, Rows], None], str] = {
    repeat_rows: "data.duplicates",
    repeat_in_capitals: "data.duplicates",
    change_an_answer: "data.conflicting_answers",
    leak_validation: "data.validation_in_train",
    change_a_word: "data.near_duplicates",
    change_a_word_of_validation: "data.validation_near_train",
    empty_prompt: "data.empty_prompt",
    drop_prompt: "data.refused",
    cut_with_dots: "data.truncated_prompts",
    cut_at_a_length: "data.truncated_prompts",
    cut_within_a_sentence: "data.truncated_prompts",
    overlong: "data.prompts_above_cap",
    name_the_answer: "data.answer_in_prompt",
    show_the_solution: "data.answer_in_prompt",
    lose_an_answer: "data.answer_missing",
    mix_types: "data.mixed_types",
    lose_a_column: "data.column_missing",
    add_weights: "data.unread_column",
    add_a_conversation: "data.unread_column",
    mark_untrained: "data.message_field_unread",
    speak_as_a_narrator: "data.unknown_role",
    leave_the_response: "data.ends_with_response",
    break_arguments: "data.tool_arguments_text",
    rename_the_answer: "reward.ignores_answer",
}


def certify(folder: Path, train: Rows, held_out: Rows) -> list[str]:
    for name, rows in (("train", train), ("validation", held_out)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    overrides = [f"data.validation={folder}/validation.jsonl"]
    name = "exact_match" if any("answer" in row for row in train) else "format_tags"
    reward = f"workers.reward_functions:{name}"
    config = make_config(None, "", reward, str(folder / "train.jsonl"), overrides)
    certificate = Certificate("planted", "quick")
    subject = read_subject(config, "planted")
    check_data(subject, certificate)
    check_prompts(subject, certificate)
    return [
        finding.name for finding in certificate.findings if finding.level is not Level.NOTE
    ]


@pytest.mark.drawn(6)
@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_defect_is_named(
    plant: Callable[[Rows, Rows], None], tmp_path: Path
) -> None:
    train = clean_rows(1)
    held_out = clean_rows(2, 40)
    plant(train, held_out)
    assert PLANTED[plant] in certify(tmp_path, train, held_out)


def test_clean_data_have_no_finding(tmp_path: Path) -> None:
    assert certify(tmp_path, clean_rows(1), clean_rows(2, 40)) == []


def test_short_prompts_that_repeat_by_chance_in_other_blanks_are_a_note(
    tmp_path: Path,
) -> None:
    """As drawings of letters do: the same few, some with blanks at their ends."""
    draw = random.Random(4)
    train = [
        {"prompt": draw.choice("ABCDEFGH") + " " * draw.randrange(40) + "?", "answer": "1"}
        for _ in range(80)
    ]
    assert certify(tmp_path, train, clean_rows(2, 40)) == []


def test_drawings_whose_blanks_differ_are_other_tasks(tmp_path: Path) -> None:
    """As rectangle_count of Reasoning Gym: without layout and punctuation, all drawings are one text."""
    train = [
        {"prompt": f"How many corners?\n{' ' * size}##\n", "answer": str(size)}
        for size in range(40)
    ]
    assert certify(tmp_path, train, clean_rows(2, 40)) == []
