import random
from pathlib import Path
from typing import Any

import pytest

from controller.offline.examples import Example
from controller.offline.tokenized import example_row
from examples.tools import data
from examples.tools.reward import exact_match
from examples.tools.warm_start import SCHEMAS, conversation, create, tokenizer
from tests.examples.dry_run import dry_run_page
from workers.rendering import Renderer

PROBLEM = (73, "-", 95)


def test_its_configuration_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create(tmp_path / "model", conversation)
    page = dry_run_page("tools", data, tmp_path, capsys)
    assert "tools add, subtract" in page and '"name": "subtract"' in page


def test_the_warm_start_learns_the_policys_turns_alone() -> None:
    tokens = tokenizer()
    rng = random.Random(0)
    record = next(
        each
        for each in iter(lambda: conversation(rng, 0.5), None)
        if len(each["messages"]) == 4
    )
    row = example_row(
        Renderer(tokens), Example([], record["messages"], {"tools": SCHEMAS}), "record 1"
    )
    learned = tokens.decode(row["input_ids"][row["loss_mask"]])
    turns = [
        turn.partition("<|im_end|>")[0]
        for turn in tokens.decode(row["input_ids"]).split("<|im_start|>assistant\n")[1:]
    ]
    assert learned.replace("<|im_end|>\n", "<|im_end|>") == "".join(
        f"{turn}<|im_end|>" for turn in turns
    )
    assert len(turns) == 2


def test_the_reward_is_of_the_final_answer() -> None:
    messages: list[dict[str, Any]] = [*data.question(*PROBLEM), *data.called(*PROBLEM)]
    assert exact_match("<think>\nx\n</think>\n\n-22", "-22", messages) == {
        "reward": 1.0,
        "called": 1.0,
    }
    assert exact_match("<think>\n-22", "-22", messages[:1]) == {
        "reward": 0.0,
        "called": 0.0,
    }
