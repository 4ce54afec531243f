"""`ballast template`: its page, its exit code, and what a dry run shows of it."""

import json
import shutil
from pathlib import Path

import pytest

from ballast.commands import main
from controller.config import load
from controller.lifecycle.input_lines import tried_lines
from controller.lifecycle.tokenized_inputs import read_inputs
from examples.addition.warm_start import tokenizer as characters
from tests.controller.stand_ins.run import SETTINGS
from tests.documentation.template_pages import BLOCK, PAGE, STOCK, block
from tests.workers.episodes.test_template_findings import MOVING

EPISODES = "rollout.environment=told.py:Told", "rollout.max_turns=2", "reward.function=''"
TOLD = (
    "from workers.environment import Observation\n\n\nclass Told:\n    def reset(self, record):\n        "
    "return ''\n\n    def step(self, response):\n        return Observation('1')\n"
)


@pytest.fixture
def workspace(
    stand_in_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """A model with the tokens of gpt-oss and its template."""
    shutil.copytree(stand_in_folder, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    made = characters()
    names = ["<|start|>", "<|message|>", "<|channel|>", "<|end|>", "<|return|>", "<|call|>"]
    made.add_special_tokens({"additional_special_tokens": names})
    made.chat_template = (STOCK / "gptoss.jinja").read_text()
    made.save_pretrained(tmp_path / "model")
    (tmp_path / "told.py").write_text(TOLD)
    (tmp_path / "chat.jsonl").write_text(
        json.dumps({"prompt": [{"role": "user", "content": "1+1="}]})
    )
    return tmp_path


def test_the_pages_in_the_documentation_are_the_commands() -> None:
    (shown,) = BLOCK.findall(PAGE.read_text())
    assert shown == block(), "python -m tests.documentation.template_pages writes them"
    assert max(map(len, shown.splitlines())) <= 80


def test_a_models_page_tells_where_engines_stop(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = characters().vocab_size
    ends = {"eos_token_id": [1, tokens + 4], "temperature": 0.6, "top_k": 20}
    (workspace / "model" / "generation_config.json").write_text(json.dumps(ends))
    assert main(["template", "model", "reasoning_effort=low"]) == 0
    page = capsys.readouterr().out
    assert f"engines stop at: <eos> (1), <|return|> ({tokens + 4})" in page
    assert "<|call|> (calls, reasoning + calls), where engines do not stop" in " ".join(
        page.split()
    )
    assert "generation_config.json: temperature 0.6, top_k 20" in page
    assert max(map(len, page.splitlines())) <= 80


@pytest.mark.drawn(3)
@pytest.mark.parametrize(
    ("template", "arguments", "code", "named"),
    [
        ("{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", (), 0, ""),
        (
            "{% for m in messages %}{{ m.content if m.role != 'tool' }}{{ eos_token }}{% endfor %}",
            (),
            1,
            "",
        ),
        ("{{ messages[0].content }}", (), 1, ""),
        ("{{ messages[0].content }}", ("high=true",), 2, "'high'"),
        ("{{ messages[0].content }}", ("high=[",), 2, ""),
        ("{{ raise_exception('nobody may speak') }}", (), 2, "nobody may speak"),
        ("{% for %}", (), 2, "mine.jinja"),
        ("{{ 'x' * 100000000000 }}", (), 2, "MemoryError"),
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            (),
            2,
            "took more than",
        ),
        ("", (), 2, "mine.jinja"),
        (None, (), 2, "mine.jinja"),
    ],
)
def test_the_exit_code_says_whether_a_message_is_refused(
    template: str | None,
    arguments: tuple[str, ...],
    code: int,
    named: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    if named == "took more than":
        monkeypatch.setattr("ballast.pages.template.TIMEOUT_S", 3.0)
    if template is not None:
        Path("mine.jinja").write_text(template)
    assert main(["template", "mine.jinja", *arguments]) == code
    out, error = capsys.readouterr()
    assert (bool(out), error.count("\n")) == (code < 2, int(code == 2))
    assert named in error


def test_a_dry_run_shows_the_table_where_messages_follow_turns_and_warns_of_every_end(
    workspace: Path,
) -> None:
    settings = [
        *SETTINGS,
        "data.validation=''",
        "data.train=chat.jsonl",
        "data.max_prompt_tokens=512",
    ]
    settings += ["rollout.max_model_tokens=1024", "policy.max_tokens_per_micro_batch=2048"]
    config = load(None, [*settings, *EPISODES])
    inputs = read_inputs(config)
    assert (
        "    user          rewrites a    rewrites b    appends       appends"
        in tried_lines(config, inputs)
    )
    (warning,) = inputs.warnings
    assert "'<|return|>'" in warning
    stops = f"rollout.sampling.stop_token_ids=[{characters().vocab_size + 4}]"
    assert not read_inputs(load(None, [*settings, *EPISODES, stops])).warnings


def test_json_is_one_object_with_what_the_page_shows(
    workspace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["template", "model", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["exit_code"] == 0
    assert document["stops"]
    assert document["findings"]["begin"].startswith("<|start|>")


def test_the_page_tells_what_becomes_of_a_system_message(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "moving.jinja"
    file.write_text(MOVING)
    main(["template", str(file)])
    assert "after a system message: rewrites: " in capsys.readouterr().out
    file.write_text(MOVING.replace("loop.last", "loop.index0 == 1"))
    main(["template", str(file)])
    assert "after a system message" not in capsys.readouterr().out
