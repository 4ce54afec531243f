"""What a run reads and tries before it starts, with a real tokenizer: from a configuration to prompts."""

import json
import os
from pathlib import Path

import pytest

import controller.data
from controller.config import load
from controller.inputs import read_inputs
from tests.controller.bad_inputs import BadInput, check_line
from tests.controller.stand_ins.run import SETTINGS, write_stand_in_workspace
from workers.errors import BallastError

CHAT = "{% for m in messages %}{{ raise_exception('no x') if m.content == 'x' else m.content }}{% endfor %}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs")
    write_stand_in_workspace(path)
    return path


@pytest.fixture
def workspace(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(folder)
    return folder


def refusal(*overrides: str) -> str:
    with pytest.raises(BallastError) as caught:
        read_inputs(load(None, [*SETTINGS, "data.validation=''", *overrides]))
    return f"error: {caught.value}\n"


def test_a_line_of_megabytes_is_left_out_without_being_tokenized(
    workspace: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    records = [{"prompt": "1+" * 3_000_000}, {"prompt": "1+1="}]
    (workspace / "long.jsonl").write_text("\n".join(map(json.dumps, records)))
    tokenized: list[object] = []
    whole = controller.data.tokenize
    monkeypatch.setattr(
        "controller.data.tokenize",
        lambda tokenizer, prompt, *, where: tokenized.append(prompt) or whole(tokenizer, prompt, where=where),
    )
    (source,) = read_inputs(load(None, [*SETTINGS, "data.validation=''", "data.train=long.jsonl"])).sources
    assert (len(source), source.dropped, tokenized) == (1, 1, ["1+1="])


def test_a_template_that_raises_on_a_later_prompt_names_the_record(workspace: Path) -> None:
    (workspace / "model" / "chat_template.jinja").write_text(CHAT)
    contents = ["1+1="] * 40 + ["x"]
    records = [{"prompt": [{"role": "user", "content": content}]} for content in contents]
    (workspace / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    line = refusal("data.train=chat.jsonl")
    check_line(BadInput("later", ["chat.jsonl record 4", "TemplateError: no x"]), 2, line)


def test_a_curriculum_orders_a_run_and_is_not_imported_by_it(workspace: Path) -> None:
    (workspace / "order.py").write_text(
        "import os\n"
        f"assert os.getpid() != {os.getpid()}\n\n\n"
        "def order(records, epoch):\n"
        "    by_length = sorted(range(len(records)), key=lambda i: -len(records[i]['prompt']))\n"
        "    return by_length[: 2 + epoch]\n"
    )
    prompts = read_inputs(load(None, [*SETTINGS, "data.validation=''", "data.curriculum=order.py:order"])).prompts
    assert [prompt.columns["prompt"] for prompt in prompts.take(0, 5)] == ["1+1=", "2+2=", "1+1=", "2+2=", "3+3="]
