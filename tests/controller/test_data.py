import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from controller.data import PromptDataset, read_records
from workers.errors import DataError


class Letters:
    """A tokenizer in the smallest sense: one id a character, and a chat template."""

    chat_template = "x"

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def apply_chat_template(self, messages: list[dict], **_: object) -> list[int]:
        return [ord(c) for message in messages for c in message["content"]]


def dataset(count: int, **options: object) -> PromptDataset:
    records = [{"prompt": f"{i:03d}", "answer": i} for i in range(count)]
    return PromptDataset(records, Letters(), prompt_key="prompt", **({"max_prompt_tokens": 8} | options))


@given(st.integers(1, 20), st.integers(1, 30), st.integers(0, 5))
def test_every_epoch_deals_every_prompt_once(count: int, size: int, seed: int) -> None:
    prompts = dataset(count, seed=seed)
    stream = [prompt for step in range(-(-2 * count // size)) for prompt in prompts.batch(step, size)]
    assert len({prompt.uid for prompt in stream}) == len(stream)
    for epoch in range(2):
        answers = [prompt.columns["answer"] for prompt in stream[epoch * count : (epoch + 1) * count]]
        assert sorted(answers) == list(range(count))


def test_a_step_is_a_pure_function_of_seed_and_step() -> None:
    order = [[p.columns["answer"] for p in dataset(50, seed=3).batch(step, 7)] for step in (9, 2, 9)]
    assert order[0] == order[2] != order[1]
    assert order[0] != [p.columns["answer"] for p in dataset(50, seed=4).batch(9, 7)]


def test_without_shuffle_the_file_order_stays() -> None:
    assert [p.columns["answer"] for p in dataset(5, shuffle=False).batch(1, 3)] == [3, 4, 0]


def test_over_long_prompts_are_dropped_and_counted_or_refused() -> None:
    records = [{"prompt": "short"}, {"prompt": "much too long"}]
    kept = PromptDataset(records, Letters(), prompt_key="prompt", max_prompt_tokens=8)
    assert (len(kept), kept.dropped) == (1, 1)
    with pytest.raises(DataError, match=r"data record 1 has 13 prompt tokens; raise data.max_prompt_tokens \(8\)"):
        PromptDataset(records, Letters(), prompt_key="prompt", max_prompt_tokens=8, over_long="error")
    with pytest.raises(DataError, match="all 2 prompts are longer"):
        PromptDataset(records, Letters(), prompt_key="prompt", max_prompt_tokens=1)


def test_chat_messages_go_through_the_template() -> None:
    records = [{"prompt": [{"role": "user", "content": "ab"}]}]
    prompt = next(iter(PromptDataset(records, Letters(), prompt_key="prompt", max_prompt_tokens=8)))
    assert prompt.ids.tolist() == [97, 98]
    assert prompt.ids.dtype == np.int32


@pytest.mark.parametrize(
    ("prompt", "message"), [("", "record 0 has an empty prompt"), (7, "record 0 has a prompt of type int")]
)
def test_prompts_that_are_none_are_named(prompt: object, message: str) -> None:
    with pytest.raises(DataError, match=message):
        PromptDataset([{"prompt": prompt}], Letters(), prompt_key="prompt", max_prompt_tokens=8)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\nnot json\n', r"x.jsonl:2 is not JSON"),
        ('{"question": "a"}\n', r"x.jsonl:1 has no 'prompt'; set data.prompt_key"),
        ("[1]\n", r"x.jsonl:1 has no 'prompt'"),
        ("\n", "has no records"),
    ],
)
def test_files_with_wrong_records_are_refused_by_line(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DataError, match=message):
        read_records(str(tmp_path / "x.jsonl"), "prompt")


def test_records_keep_their_columns(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": 1}, {"prompt": "b", "answer": 2}]
    (tmp_path / "x.jsonl").write_text("\n".join(map(json.dumps, rows)))
    assert read_records(str(tmp_path / "x.jsonl"), "prompt") == rows
