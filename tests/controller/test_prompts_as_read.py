"""From a file to ids: decoded, a prompt is what its record shows, whatever the tokenizer adds of itself."""

import json
import math
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest
from tokenizers.processors import TemplateProcessing

from ballast.sampling_commands import evaluate, generate
from controller import fit, preferences, reward_model, sft
from controller.config import Config, load, load_as, to_yaml
from controller.config.offline import PreferencesConfig, RewardTrainingConfig, SftConfig
from controller.data.records import read_records
from controller.lifecycle.input_lines import prompt_lines
from controller.lifecycle.inputs import try_inputs
from controller.lifecycle.tokenized_inputs import Inputs, tokenize_inputs
from controller.observability.shown_text import show_prompt
from controller.offline.examples import sft_examples
from examples.addition.warm_start import create_model
from examples.addition.warm_start import tokenizer as characters
from tests.controller.stand_ins.run import SETTINGS
from tests.json_lines import write_lines
from workers.chat_messages import clean_prompt
from workers.errors import BallastError, ConfigError, DataError
from workers.model.pretrained import load_tokenizer
from workers.rendering import Renderer

TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}{{ '+' if m.role == 'user' else '=' }}{{ m.content }}"
    "{{ '9' if 'tool_calls' in m }}{{ eos_token if m.role == 'assistant' }}{% endfor %}"
    "{{ '=' if add_generation_prompt }}"
)
USER, SAID = {"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}
SCHEMA = {
    sft: SftConfig,
    preferences: PreferencesConfig,
    reward_model: RewardTrainingConfig,
}
CHAT = [
    *SETTINGS,
    "data.train=x.jsonl",
    "data.validation=''",
    "data.max_prompt_tokens=64",
    "policy.max_tokens_per_micro_batch=72",
]


@pytest.fixture
def workspace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "reward.py").write_text("def reward(response):\n    return 0.0\n")
    write_model(tmp_path / "model", adds="$A")
    return tmp_path


def write_model(
    folder: Path, adds: str, template: str = TEMPLATE, tokens: Sequence[str] = ()
) -> None:
    """adds: what the tokenizer makes of a text `$A`. tokens: special ones beside <bos> and <eos>."""
    made = characters()
    made.add_special_tokens(
        {"bos_token": "<bos>", "additional_special_tokens": list(tokens)}
    )
    own = [(name, made.convert_tokens_to_ids(name)) for name in ("<bos>", "<eos>")]
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single=adds, special_tokens=own
    )
    made.chat_template = template
    create_model(folder, 0, made, width=128, layers=1)


def write(path: Path, prompts: list[Any]) -> None:
    rows = [{"prompt": prompt} for prompt in prompts]
    if path.suffix == ".jsonl":
        write_lines(path, rows)
    else:
        pa.parquet.write_table(pa.Table.from_pylist(rows), path)


def decoded(found: Inputs) -> list[str]:
    decode = characters()
    decode.add_special_tokens({"bos_token": "<bos>"})
    return [decode.decode(prompt.ids) for source in found.sources for prompt in source]


def texts(rng: random.Random) -> str:
    return "".join(
        rng.choices(
            ["<bos>", "<eos>", "1", "2", "+", "="], [1, 1, 3, 3, 3, 3], k=rng.randint(1, 9)
        )
    )


def chats(rng: random.Random) -> list[dict[str, Any]]:
    """From two to four messages, the last of the user, with keys that are None, and texts in parts."""
    roles = [["user", "assistant"][i % 2] for i in range(rng.choice([1, 3]))]
    return [
        {
            "role": role,
            "content": [
                {"type": "text", "text": texts(rng), "image": None} for _ in range(2)
            ],
            "tool_calls": None,
        }
        for role in roles
    ]


def shown(prompt: Any, adds: str) -> str:
    if isinstance(prompt, str):
        return (
            prompt
            if prompt.startswith("<bos>") or "<bos>" not in adds
            else f"<bos>{prompt}"
        )
    turns = [
        ("+" if m["role"] == "user" else "=")
        + "".join(part["text"] for part in m["content"])
        + "<eos>" * (m["role"] == "assistant")
        for m in prompt
    ]
    return f"<bos>{''.join(turns)}="


def test_decoded_a_prompt_is_what_its_record_shows(workspace: Path) -> None:
    rng = random.Random(0)
    text, chat = [[make(rng) for _ in range(30)] for make in (texts, chats)]
    sources = {
        "text.jsonl": text,
        "chat.jsonl": chat,
        "text.parquet": text,
        "chat.parquet": chat,
    }
    for name, prompts in sources.items():
        write(workspace / name, prompts)
    weights = ", ".join(f"{name}: 1" for name in sources)
    config = load(None, [*CHAT, "data.train=''", f"data.sources={{{weights}}}"])
    tried = try_inputs(config)
    for adds in ("$A", "<bos> $A", "$A <eos>", "<bos> $A <eos>"):
        write_model(workspace / "model", adds)
        found = tokenize_inputs(config, tried)
        assert decoded(found) == [
            shown(prompt, adds) for prompts in sources.values() for prompt in prompts
        ]
        assert prompt_lines(found)[1].strip() == shown(text[0], adds)


def test_an_assistants_last_message_is_refused_or_continued(workspace: Path) -> None:
    write(workspace / "x.jsonl", [[USER, SAID], [USER]])
    tried = try_inputs(load(None, CHAT))
    with pytest.raises(
        BallastError,
        match=r"x.jsonl record 1 ends with an assistant's .* data.continue_last_message=",
    ):
        tokenize_inputs(load(None, CHAT), tried)
    found = tokenize_inputs(load(None, [*CHAT, "data.continue_last_message=true"]), tried)
    assert decoded(found) == ["<bos>+1+1=2", "<bos>+1+1="]


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        ("", "an empty prompt"),
        (7, "a prompt of type int"),
        (["1+1"], "malformed chat message"),
        ([{"role": "user"}], "of role 'user' whose content is of type NoneType"),
        (
            [USER, {"role": "assistant", "content": None, "tool_calls": []}],
            "of role 'assistant' whose content is of",
        ),
        ([{"role": "user", "content": 7}], "whose content is of type int"),
        ([{"role": "user", "content": [{"type": "video"}]}], "with a part of type 'video'"),
        ("1\ud800", "column 'prompt'"),
        ([{"role": "user", "content": "1\ud800"}], "column 'prompt'"),
    ],
)
def test_a_prompt_that_is_none_is_named_when_it_is_read(
    workspace: Path, prompt: Any, words: str
) -> None:
    write(workspace / "x.jsonl", ["1+1=", prompt])
    with pytest.raises(BallastError, match=f"x.jsonl:2:? .*{words}"):
        read_records("x.jsonl", "prompt")


def test_none_is_dropped_at_the_top_of_a_message_alone(workspace: Path) -> None:
    call = {
        "role": "assistant",
        "content": None,
        "name": None,
        "tool_calls": [{"arguments": {"x": None}}],
    }
    write(workspace / "x.jsonl", [[USER | {"name": None}, call, USER]])
    calls = {"role": "assistant", "tool_calls": [{"arguments": {"x": None}}]}
    assert read_records("x.jsonl", "prompt") == [{"prompt": [USER, calls, USER]}]
    parts = {
        "role": "user",
        "content": [{"type": "text", "text": "1"}, {"type": "text", "text": "2"}],
    }
    assert show_prompt([calls, parts]) == "assistant: ({'x': None})\n\nuser: 12"


@pytest.mark.parametrize(
    "content", ["12", [{"type": "text", "text": "1"}, "2"]], ids=["text", "parts"]
)
@pytest.mark.parametrize(
    "shows",
    [
        "{{ m.content }}",
        "{% for part in m.content %}{{ part.text }}{% endfor %}",
        "{% for p in ([{'text': m.content}] if m.content is string else m.content) %}{{ p.text }}{% endfor "
        "%}",
        "{{ m.content | trim }}",
    ],
)
def test_a_template_gets_contents_in_the_form_that_it_shows(
    shows: str, content: Any
) -> None:
    made = characters()
    made.chat_template = f"{{% for m in messages %}}{shows}{{% endfor %}}="
    prompt = clean_prompt([{"role": "user", "content": content}], "x")
    assert made.decode(Renderer(made).prompt_ids(prompt, "x")) == "12="


@pytest.mark.drawn(4)
@pytest.mark.parametrize(
    ("command", "record"),
    [
        (fit, {"prompt": [{"role": "user", "content": None}]}),
        (generate, {"prompt": [{"role": "user"}]}),
        (evaluate, {"prompt": [{"role": "user", "content": None}]}),
        (sft, {"messages": [USER, {"role": "assistant", "content": None}]}),
        (sft, {"prompt": [USER, SAID], "response": "3"}),
        (
            preferences,
            {"prompt": [USER], "chosen": "1", "rejected": [{"role": "assistant"}]},
        ),
        *(
            (command, {"prompt": "1", "response": "2\ud800"})
            for command in (fit, generate, evaluate, sft)
        ),
        (preferences, {"prompt": "1", "chosen": "2", "rejected": "3", "\udfff": 1}),
        (reward_model, {"prompt": "1", "chosen": "2", "rejected": "3", "margin": math.nan}),
        (reward_model, {"prompt": "1", "chosen": "2", "rejected": "3", "margin": "1"}),
    ],
)
def test_every_command_refuses_a_bad_record_by_name(
    workspace: Path,
    command: Any,
    record: dict[str, Any],
    capsys: pytest.CaptureFixture[str],
) -> None:
    (workspace / "x.jsonl").write_text(json.dumps(record))
    assert dry_run(command) == 2
    error = capsys.readouterr().err
    # The file is for training and validation.
    assert all(
        line.startswith("error: ") and "x.jsonl" in line for line in error.splitlines()
    )
    assert 1 <= error.count("\n") <= 2


UNREAD = {
    "messages": [USER, SAID],
    "turns": [USER, SAID],
    "tools": '[{"name": "add"}]',
    "picture": {"bytes": "iVBORw0KGgo", "path": None},
}
PROMPT = {"prompt": "1+1="}
READABLE = {
    fit: PROMPT,
    generate: PROMPT,
    evaluate: PROMPT,
    sft: PROMPT | {"response": "2"},
    preferences: PROMPT | {"chosen": "2", "rejected": "3"},
    reward_model: PROMPT | {"chosen": "2", "rejected": "3"},
}


@pytest.mark.parametrize("command", READABLE)
def test_a_dry_run_names_columns_of_data_that_nothing_reads(
    workspace: Path, command: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    columns = UNREAD | {
        "text": "2",
        "number": 1,
        "extra": {"index": 1},
        "names": ["1"],
        "conversations": [],
    }
    if command is sft:  # which reads them
        del columns["messages"]
    (workspace / "x.jsonl").write_text(json.dumps(READABLE[command] | columns))
    assert dry_run(command) == 0
    (warning,) = [
        line for line in capsys.readouterr().out.splitlines() if "nothing reads" in line
    ]
    assert {
        name for name in (*columns, "prompt") if f"'{name}'" in warning
    } == UNREAD.keys() & columns.keys()


@pytest.mark.drawn(5)
@pytest.mark.parametrize("command", READABLE)
@pytest.mark.parametrize(
    "content", ["", " \n", [{"type": "text", "text": " "}]], ids=["empty", "blank", "parts"]
)
def test_a_chat_of_blank_messages_is_refused(
    workspace: Path, command: Any, content: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    prompt = [{"role": "system", "content": ""}, {"role": "user", "content": content}]
    (workspace / "x.jsonl").write_text(json.dumps(READABLE[command] | {"prompt": prompt}))
    assert dry_run(command) == 2
    error = capsys.readouterr().err
    assert "x.jsonl" in error and "empty prompt" in error


def test_a_reward_or_a_chat_template_reads_columns(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (workspace / "reward.py").write_text("def reward(response, turns):\n    return 0.0\n")
    write_model(workspace / "model", "$A", TEMPLATE + "{{ tools | length if tools }}")
    tool = {"name": "add", "description": "", "parameters": {}}
    (workspace / "x.jsonl").write_text(
        json.dumps({"prompt": [USER], "tools": [tool], "turns": [USER]})
    )
    assert dry_run(fit) == 0
    assert "nothing reads" not in capsys.readouterr().out


OLD_CALL = {
    "role": "assistant",
    "content": None,
    "function_call": {"name": "add", "arguments": '{"x": 1}'},
}


def test_a_function_call_of_the_older_form_is_a_tool_call() -> None:
    (message,) = clean_prompt([OLD_CALL], "x")
    assert message == {
        "role": "assistant",
        "tool_calls": [{"type": "function", "function": OLD_CALL["function_call"]}],
    }


@pytest.mark.parametrize("call", ["add", {"arguments": "{}"}, [], 7])
def test_a_malformed_function_call_is_named(call: Any) -> None:
    with pytest.raises(DataError, match="function_call="):
        clean_prompt([OLD_CALL | {"function_call": call}], "x")
    with pytest.raises(DataError, match="function_call="):
        clean_prompt([OLD_CALL | {"tool_calls": [{"name": "add", "arguments": {}}]}], "x")


def test_learned_calls_hold_no_arguments_that_arrow_added(workspace: Path) -> None:
    calls = [
        {"type": "function", "function": {"name": "f", "arguments": {name: 1}}}
        for name in "xy"
    ]
    rows = [
        {"messages": [USER, {"role": "assistant", "content": "", "tool_calls": [call]}]}
        for call in calls
    ]
    pa.parquet.write_table(pa.Table.from_pylist(rows), "x.parquet")
    assert pa.parquet.read_table("x.parquet").to_pylist() != rows
    examples = [
        sft_examples(record, ("messages", "", ""), "x")[0]
        for record in read_records("x.parquet")
    ]
    assert [example.response for example in examples] == [row["messages"] for row in rows]


PAIR = {"prompt": [USER], "chosen": [SAID], "rejected": "3"}
EQUAL = PAIR | {"rejected": "2"}
END = TEMPLATE.replace("eos_token", "'<end>'")


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("command", "records", "code", "words"),
    [
        (
            fit,
            [{"prompt": "1<far>"}],
            2,
            "x.jsonl record 1 has token id 38, '<far>', outside",
        ),
        (generate, [{"prompt": "1<far>"}], 2, "has token id 38"),
        (sft, [{"prompt": "1", "response": "2<far>"}], 2, "has token id 38"),
        (
            fit,
            [{"prompt": [USER]}],
            0,
            "the chat template of model.path=model ends a turn with '<end>'",
        ),
        (evaluate, [{"prompt": [USER]}], 0, "Add its id, 19, to eos_token_id"),
        (
            sft,
            [{"messages": [USER, SAID]}],
            0,
            "the first record, as the model reads it:\n    <bos>+1+1=2<end>\n",
        ),
        (
            sft,
            [{"messages": [USER, SAID]}],
            0,
            "the chat template of model.path=model ends a turn with '<end>'",
        ),
        (preferences, [PAIR, EQUAL], 0, "x.jsonl: 1 of 2 pairs have equal responses"),
        (
            preferences,
            [{"chosen": [USER, SAID], "rejected": [USER, SAID]}],
            2,
            "responses are equal in all records",
        ),
    ],
)
def test_a_dry_run_finds_what_a_model_cannot_read_end_or_learn(
    workspace: Path,
    command: Any,
    records: list[Any],
    code: int,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    write_model(
        workspace / "model",
        "$A",
        END,
        ["<end>", *(f"<{number}>" for number in range(18)), "<far>"],
    )
    write_lines(workspace / "x.jsonl", records)
    assert dry_run(command) == code
    assert words in "".join(capsys.readouterr())
    if "Add its id" in words:
        (workspace / "model/generation_config.json").write_text('{"eos_token_id": [1, 19]}')
        assert dry_run(command) == 0
        assert "warning" not in capsys.readouterr().out
        (workspace / "model/generation_config.json").write_text('{"eos_token_id": [1, 32]}')
        assert dry_run(command) == 2
        assert "eos_token_id 32 is outside the vocabulary of 32" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("file", "content"),
    [
        *(
            ("tokenizer.json", text)
            for text in ("{}", "[]", '{"model": 5}', '{"model"', "")
        ),
        *(
            ("tokenizer_config.json", text)
            for text in ('{"eos_token": 5}', '{"added_tokens_decoder": 5}')
        ),
        ("tokenizer_config.json", '{"tokenizer_class": []}'),
    ],
)
def test_a_broken_tokenizer_is_named(workspace: Path, file: str, content: str) -> None:
    (workspace / "model" / file).write_text(content)
    with pytest.raises(ConfigError, match=r"^model.path=model has no tokenizer: .+$"):
        load_tokenizer("model")


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("file", "content", "command", "words"),
    [
        ("tokenizer.json", "{}", fit, "model.path=model has no tokenizer"),
        ("chat_template.jinja", "{{ 'x' * 400000000 }}", sft, "400,000,000 characters"),
        ("chat_template.jinja", "{{ 'x' * 100000000000 }}", generate, "MemoryError"),
        (
            "chat_template.jinja",
            "{{ messages[0].content[:1] * 20000001 }}",
            evaluate,
            "20,000,001 characters",
        ),
        ("chat_template.jinja", "{{ '\\ud800' }}", fit, "x.jsonl record 1"),
    ],
)
def test_a_broken_template_or_tokenizer_is_one_line_of_every_command(
    workspace: Path,
    file: str,
    content: str,
    command: Any,
    words: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (workspace / "model" / file).write_text(content)
    (workspace / "x.jsonl").write_text(json.dumps({"prompt": [USER], "response": "2"}))
    assert dry_run(command) == 2
    error = capsys.readouterr().err
    assert (
        error.startswith("error: ")
        and words in error
        and error.count("\n") == 1
        and len(error) < 400
    )


def dry_run(command: Any) -> int:
    """Its exit code."""
    online = command in (fit, generate, evaluate)
    own = [
        *CHAT,
        "data.validation=x.jsonl",
        "resources.device=cpu",
        "resources.user_code_timeout_s=600",  # on a loaded machine, long texts took a minute
        "policy.data_parallel=1",
    ]
    settings = (
        own if online else ["model.path=model", "data.train=x.jsonl", "data.max_tokens=64"]
    )
    Path("config.yaml").write_text(
        to_yaml(load_as(Config if online else SCHEMA[command], None, settings))
    )
    return int(command.main(["--config", "config.yaml", "--dry-run"]))
