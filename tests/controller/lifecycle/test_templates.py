"""Chat templates as a configuration gives them: the file, its arguments, and the tools and arguments of
records.
"""

import json
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
from tests.json_lines import write_lines
from tests.refusals import refused, refused_rows
from workers.errors import BallastError, DataError

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
def workspace(stand_in_workspace: Path) -> Path:
    (stand_in_workspace / "mine.jinja").write_text(TEMPLATE)
    write(stand_in_workspace)
    return stand_in_workspace


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


def read_chats(*overrides: str) -> None:
    config = load(None, [*SETTINGS, *GIVEN, *overrides])
    check(config)
    read_inputs(config)


@pytest.mark.drawn(2)
@refused_rows("""
"never reads 'hihg'" "data.chat_template_arguments={hihg: true}"
"data.chat_template_arguments={tools: []}"
model.chat_template=no.jinja
model.chat_template=model
model.chat_template=empty
model.chat_template=bytes
model.chat_template=broken.jinja
""")
def test_a_template_that_is_none_or_never_reads_an_argument_is_refused(
    workspace: Path, named: str, overrides: list[str]
) -> None:
    (workspace / "empty").write_text("")
    (workspace / "bytes").write_bytes(b"\xff")
    (workspace / "broken.jinja").write_text("{% for %}")
    with refused(named):
        read_chats(*overrides)


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("columns", "named"),
    [
        ({"chat_template_arguments": {"low": 1}}, "never reads 'low'"),
        ({"chat_template_arguments": {"messages": []}}, "chat.jsonl record 1"),
        ({"chat_template_arguments": "[1]"}, "chat.jsonl record 1"),
        ({"tools": "add"}, "chat.jsonl record 1"),
        ({"tools": [{"description": "x"}]}, "chat.jsonl record 1"),
        ({"tools": [3]}, "chat.jsonl record 1"),
        ({"prompt": "1+1="}, "model.chat_template"),
    ],
)
def test_a_record_that_no_template_can_use_is_refused(
    workspace: Path, columns: dict[str, Any], named: str
) -> None:
    write(workspace, **columns)
    with refused(named, BallastError):
        read_chats()


def test_tools_for_a_template_that_never_reads_them_are_refused(workspace: Path) -> None:
    write(workspace, tools=[ADD])
    (workspace / "mine.jinja").write_text("{{ messages[0].content }}")
    with refused("never reads 'tools'"):
        read_chats()


def test_an_option_that_a_later_record_alone_gives_is_checked_too(workspace: Path) -> None:
    records = [{"prompt": CHAT}] * 40 + [
        {"prompt": CHAT, "chat_template_arguments": {"low": 1}}
    ]
    write_lines(workspace / "chat.jsonl", records)
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
