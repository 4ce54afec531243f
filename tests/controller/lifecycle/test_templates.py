"""Chat templates as a configuration gives them: the file, its arguments, and the tools and arguments of
records.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from controller.config import Config, load, load_as
from controller.config.offline import SftConfig
from controller.config.sampler import GenerateConfig
from controller.lifecycle.tokenized_inputs import load_renderer, read_inputs
from controller.offline import offline_training
from controller.preflight.checks import check
from tests.controller.stand_ins.run import SETTINGS
from tests.refusals import refused
from workers.errors import ConfigError, DataError

TEMPLATE = (  # in digits, which the tokenizer knows: 7 for each tool, then 8, or 9 with `high`
    "{% for m in messages %}{{ m.content }}{% endfor %}{% for t in tools or [] %}7{% endfor %}"
    "{% if high is defined and high %}9{% else %}8{% endif %}"
)
CHAT = [{"role": "user", "content": "1+1="}]
ADD = {
    "name": "add",
    "description": "Add.",
    "parameters": {"type": "object", "properties": {}},
}
TOOL = {"type": "function", "function": ADD}
GIVEN = ("model.chat_template=mine.jinja", "data.train=chat.jsonl", "data.validation=''")


@pytest.fixture
def workspace(
    stand_in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    shutil.copytree(stand_in_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.jinja").write_text(TEMPLATE)
    write(tmp_path)
    return tmp_path


def write(folder: Path, **columns: Any) -> None:
    (folder / "chat.jsonl").write_text(
        json.dumps({"prompt": CHAT, "response": "2"} | columns)
    )


@pytest.mark.drawn(8)
@pytest.mark.parametrize(
    ("columns", "argument", "expected"),
    [
        ({}, "", "1+1=8"),
        ({}, "true", "1+1=9"),
        (
            {"tools": None, "chat_template_arguments": {"high": True, "other": None}},
            "",
            "1+1=9",
        ),
        ({"chat_template_arguments": {"high": False}}, "true", "1+1=8"),
        (
            {"chat_template_arguments": '{"high": true}', "tools": [ADD, TOOL]},
            "false",
            "1+1=779",
        ),
        ({"tools": json.dumps([TOOL])}, "", "1+1=78"),
        ({"tools": [json.dumps(ADD)]}, "", "1+1=78"),
        ({"tools": []}, "", "1+1=8"),
    ],
)
@pytest.mark.parametrize("command", ["fit", "generate", "sft"])
def test_prompts_are_rendered_by_the_file_with_the_runs_and_the_records_options(
    workspace: Path, command: str, columns: dict[str, Any], argument: str, expected: str
) -> None:
    write(workspace, **columns)
    given = [
        *GIVEN,
        *([f"data.chat_template_arguments={{high: {argument}}}"] if argument else []),
    ]
    if command == "sft":
        (workspace / "chat.jsonl").write_text(
            json.dumps({"messages": [*CHAT, turn("2")]} | columns)
        )
        given = ["run.name=x", "model.path=model", *given, "resources.device=cpu"]
        template = TEMPLATE.replace(
            "{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}"
        )
        (workspace / "mine.jinja").write_text(template)
        settings: Any = load_as(SftConfig, None, given)
        assert offline_training.read_inputs(settings).first_text == expected.replace(
            "=", "=2"
        )
        return
    schema = GenerateConfig if command == "generate" else Config
    config: Any = load_as(schema, None, [*SETTINGS, *given])
    check(config)
    inputs = read_inputs(config)
    (prompt,) = inputs.prompts.take(0, 1)
    assert inputs.first_prompt == expected
    assert len(prompt.options.get("tools", [])) == expected.count("7")
    messages, tokenizer = prompt.columns["prompt"], load_renderer(config).tokenizer
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True, **prompt.options
    )
    assert text == expected


def turn(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.mark.drawn(5)
@pytest.mark.parametrize(
    ("columns", "overrides", "named", "error"),
    [
        (
            {},
            ["data.chat_template_arguments={hihg: true}"],
            "never reads 'hihg'",
            ConfigError,
        ),
        ({"chat_template_arguments": {"low": 1}}, [], "never reads 'low'", ConfigError),
        (
            {},
            ["data.chat_template_arguments={tools: []}"],
            "data.chat_template_arguments",
            ConfigError,
        ),
        (
            {"chat_template_arguments": {"messages": []}},
            [],
            "chat.jsonl record 1",
            DataError,
        ),
        ({"chat_template_arguments": "[1]"}, [], "chat.jsonl record 1", DataError),
        ({"tools": "add"}, [], "chat.jsonl record 1", DataError),
        ({"tools": [{"description": "x"}]}, [], "chat.jsonl record 1", DataError),
        ({"tools": [3]}, [], "chat.jsonl record 1", DataError),
        ({"prompt": "1+1="}, [], "model.chat_template", ConfigError),
        ({}, ["model.chat_template=no.jinja"], "model.chat_template=no.jinja", ConfigError),
        ({}, ["model.chat_template=model"], "model.chat_template=model", ConfigError),
        ({}, ["model.chat_template=empty"], "model.chat_template=empty", ConfigError),
        ({}, ["model.chat_template=bytes"], "model.chat_template=bytes", ConfigError),
        (
            {"tools": [ADD]},
            ["model.chat_template=plain.jinja"],
            "never reads 'tools'",
            ConfigError,
        ),
        (
            {},
            ["model.chat_template=broken.jinja"],
            "model.chat_template=broken.jinja",
            ConfigError,
        ),
    ],
)
def test_what_no_template_can_use_is_refused(
    workspace: Path,
    columns: dict[str, Any],
    overrides: list[str],
    named: str,
    error: type[Exception],
) -> None:
    write(workspace, **columns)
    (workspace / "empty").write_text("")
    (workspace / "bytes").write_bytes(b"\xff")
    (workspace / "plain.jinja").write_text("{{ messages[0].content }}")
    (workspace / "broken.jinja").write_text("{% for %}")
    with refused(named, error):
        config = load(None, [*SETTINGS, *GIVEN, *overrides])
        check(config)
        read_inputs(config)


def test_an_option_that_a_later_record_alone_gives_is_checked_too(workspace: Path) -> None:
    records = [{"prompt": CHAT}] * 40 + [
        {"prompt": CHAT, "chat_template_arguments": {"low": 1}}
    ]
    (workspace / "chat.jsonl").write_text("\n".join(map(json.dumps, records)))
    with refused("chat.jsonl record 41", DataError):
        read_inputs(load(None, [*SETTINGS, *GIVEN]))


def test_a_model_with_a_template_for_tools_renders_tools_by_it(workspace: Path) -> None:
    write(workspace, tools=[ADD])
    (workspace / "model" / "chat_template.jinja").write_text("{{ messages[0].content }}")
    (workspace / "model" / "additional_chat_templates").mkdir()
    (workspace / "model" / "additional_chat_templates" / "tool_use.jinja").write_text(
        TEMPLATE
    )
    assert (
        read_inputs(load(None, [*SETTINGS, *GIVEN, "model.chat_template=''"])).first_prompt
        == "1+1=78"
    )
