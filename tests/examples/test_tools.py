import json
import random
from pathlib import Path
from typing import Any

import pytest

from controller import fit
from controller.offline.examples import Example
from controller.offline.tokenized import example_row
from examples.addition.warm_start import create_model
from examples.tools import data
from examples.tools.reward import exact_match
from examples.tools.warm_start import SCHEMAS, VOCABULARY, conversation, tokenizer
from workers.rendering import Renderer

PROBLEM = (73, "-", 95)


def test_its_configuration_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create_model(
        tmp_path / "model",
        0,
        tokenizer(),
        width=128,
        layers=2,
        vocabulary=VOCABULARY,
        positions=256,
    )
    overrides = [f"run.dir={tmp_path}", f"model.path={tmp_path / 'model'}"]
    for name, held_out in (("train", False), ("validation", True)):
        data.write(tmp_path / f"{name}.jsonl", 300, seed=0, held_out=held_out)
        overrides.append(f"data.{name}={tmp_path / name}.jsonl")
    assert (
        fit.main(["--config", "examples/tools/config.yaml", "--dry-run", *overrides]) == 0
    )
    told = capsys.readouterr().out
    assert "tools add, subtract" in told and '"name": "subtract"' in told
    prompts = [
        {
            json.loads(line)["prompt"][0]["content"]
            for line in (tmp_path / f"{name}.jsonl").open()
        }
        for name in ("train", "validation")
    ]
    assert not prompts[0] & prompts[1]


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
