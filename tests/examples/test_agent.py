import ast
import json
import os
import random
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from types import SimpleNamespace
from typing import Any

import pytest

from examples.agent import agent, data
from examples.agent.warm_start import conversation
from examples.tools.warm_start import create
from tests.examples.dry_run import dry_run_page

ROOT = Path(__file__).parents[2]
FILE = ROOT / "examples" / "agent" / "agent.py"
QUESTION = (73, 95)


class Model(BaseHTTPRequestHandler):
    """A server of OpenAI's API that asks the database, and then answers with what it read."""

    def do_POST(self) -> None:
        assert (
            self.path == "/v1/chat/completions"
            and self.headers["Authorization"] == "Bearer a-key"
        )
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert asked["tools"] == agent.TOOLS
        last = asked["messages"][-1]
        said: dict[str, Any] = {"role": "assistant", "content": last["content"]}
        if last["role"] == "user":
            call = data.called(*QUESTION)[0]["tool_calls"][0]["function"]
            call = {"name": call["name"], "arguments": json.dumps(call["arguments"])}
            said |= {
                "content": None,
                "tool_calls": [{"id": "call-1", "type": "function", "function": call}],
            }
        choice = {"index": 0, "finish_reason": "stop", "message": said}
        body = json.dumps(
            {
                "id": "x",
                "object": "chat.completion",
                "created": 0,
                "model": "x",
                "choices": [choice],
            }
        )
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: Any) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Model) as served:
        Thread(target=served.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{served.server_port}/v1"
        served.shutdown()


@pytest.fixture
def database(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "cache" / "prices.db"
    path.parent.mkdir()
    data.create_database(path)
    monkeypatch.setattr(agent, "DATABASE", path)
    return path


def test_the_agent_is_a_program_that_needs_nothing_of_ours(
    server: str, database: Path
) -> None:
    program = database.parents[1] / "agent.py"
    shutil.copy(FILE, program)
    environment = os.environ | {
        "OPENAI_BASE_URL": server,
        "OPENAI_API_KEY": "a-key",
        "PYTHONPATH": "",
    }
    command = [sys.executable, "-P", str(program), data.question(*QUESTION)[0]["content"]]
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
