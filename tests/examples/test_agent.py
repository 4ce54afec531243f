import ast
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from examples.agent import agent, data
from examples.agent.warm_start import conversation
from examples.tools.warm_start import create
from tests.examples.dry_run import dry_run_page
from tests.workers.agents.chat_server import ChatRequest, serve_chats

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "agent" / "agent.py"
QUESTION = (73, 95)


def ask_the_database(request: ChatRequest) -> dict[str, Any]:
    """Call the tool, and then answer with what it said."""
    assert request.path == "/v1/chat/completions"
    assert request.headers["Authorization"] == "Bearer a-key"
    assert request.body["tools"] == agent.TOOLS
    last = request.body["messages"][-1]
    if last["role"] != "user":
        return {"role": "assistant", "content": last["content"]}
    function = data.called(*QUESTION)[0]["tool_calls"][0]["function"]
    function |= {"arguments": json.dumps(function["arguments"])}
    call = {"id": "call-1", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "prices.db"
    path.parent.mkdir()
    data.create_database(path)
    monkeypatch.setattr(agent, "DATABASE", path)
    return path


def test_the_agent_is_a_program_that_needs_nothing_of_ours(database: Path) -> None:
    program = database.parents[1] / "agent.py"
    shutil.copy(FILE, program)
    command = [sys.executable, "-P", str(program), data.question(*QUESTION)[0]["content"]]
    with serve_chats(ask_the_database) as url:
        environment = os.environ | {
            "OPENAI_BASE_URL": url,
            "OPENAI_API_KEY": "a-key",
            "PYTHONPATH": "",
        }
        said = subprocess.run(
            command, cwd=database.parent, env=environment, capture_output=True, text=True
        )
    assert said.stdout == f"{data.price(*QUESTION)}\n", said.stderr
    text = FILE.read_text()
    imported = {
        each.module
        for each in ast.walk(ast.parse(text))
        if isinstance(each, ast.ImportFrom)
    }
    assert (
        imported == {"contextlib", "pathlib", "typing", "openai"}
        and "ballast" not in text.lower()
    )


def test_its_queries_change_nothing(database: Path, tmp_path: Path) -> None:
    before = database.read_bytes()
    for sql in (
        "DELETE FROM prices",
        f"ATTACH '{tmp_path}/new.db' AS new",
        "PRAGMA user_version=7",
    ):
        with pytest.raises(sqlite3.Error):
            agent.query(sql)
    assert database.read_bytes() == before and not (tmp_path / "new.db").exists()
    assert len(agent.query("SELECT * FROM prices").splitlines()) == agent.ROWS


def test_a_policy_that_calls_in_every_turn_has_no_answer(database: Path) -> None:
    call = SimpleNamespace(
        id="1", type="function", function=SimpleNamespace(arguments="{}")
    )
    said = SimpleNamespace(content=None, tool_calls=[call])
    answers = SimpleNamespace(choices=[SimpleNamespace(message=said)])
    client: Any = SimpleNamespace()
    client.chat = SimpleNamespace(completions=SimpleNamespace(create=lambda **_: answers))
    assert agent.answer(client, data.question(*QUESTION)) == ""


def test_the_warm_start_shows_what_the_database_says(database: Path) -> None:
    for seed in range(9):
        _, call, result, last = conversation(random.Random(seed), 1.0)["messages"]
        sql = call["tool_calls"][0]["function"]["arguments"]["sql"]
        assert agent.query(sql) == result["content"] == last["content"]


def test_its_configuration_is_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    create(tmp_path / "model", conversation)
    page = dry_run_page("agent", data, tmp_path, capsys)
    assert "examples/agent/agent.py:run" in page
