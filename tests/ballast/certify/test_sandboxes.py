"""What a run plays in a sandbox, a certificate plays in one too."""

import asyncio
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cloudpickle
import pytest
from transformers.utils import get_json_schema

from ballast.certify.__main__ import main
from ballast.certify.environment.agent_checks import TriedAgent, check_agent
from ballast.certify.environment.tool_checks import TriedTools, check_tools
from ballast.certify.findings import Finding
from examples.tools.tools import add
from tests.ballast.certify.planted_tools import runs_shell
from tests.workers.sandbox.conftest import needs_bubblewrap
from workers.config.sandbox import SandboxConfig
from workers.sandbox import tools as sandbox_tools
from workers.user_code.functions import Tools

pytestmark = needs_bubblewrap
SANDBOX = SandboxConfig(kind="bubblewrap", command_timeout_s=5.0)
ENVIRONMENT = """
from workers.environment import Observation
from workers.sandbox.kinds import open_run_sandbox


class Mine:
    def reset(self, record):
        self.sandbox = open_run_sandbox()
        self.sandbox.start()
        self.sandbox.write("answer", record["answer"].encode())
        return "Say the number."

    def step(self, response):
        answer = self.sandbox.read("answer").decode()
        self.sandbox.stop()
        return Observation("", reward=float(str(response).strip() == answer), done=True)
"""


def check(
    *functions: Callable[..., Any], sandbox: SandboxConfig = SANDBOX
) -> tuple[list[Finding], int]:
    packed = cloudpickle.dumps({function.__name__: function for function in functions})
    tools = Tools(packed, [get_json_schema(function) for function in functions])
    tried = TriedTools(
        tools, timeout_s=5.0, max_calls=8, max_characters=1000, sandbox=sandbox
    )
    return asyncio.run(check_tools(tried, ["alpha", "beta 2", "3+4"]))


def test_tools_of_a_sandbox_are_played_in_one() -> None:
    names = [getattr(sandbox_tools, name) for name in sandbox_tools.__all__]
    findings, calls = check(*names)
    assert findings == [] and calls == 4
    findings, _ = check(sandbox_tools.shell, add)
    assert findings == []
    findings, _ = check(sandbox_tools.read_file, runs_shell)
    assert [finding.name for finding in findings] == ["tools.runs_code_unconfined"]


def test_a_sandbox_that_does_not_start_is_a_finding() -> None:
    findings, _ = check(
        sandbox_tools.shell, sandbox=SandboxConfig(kind="docker:tests/image")
    )
    assert [finding.name for finding in findings] == ["tools.sandbox_fails"]
    assert "docker" in findings[0].evidence


@pytest.mark.parametrize("inside", [True, False])
def test_an_agents_command_is_played_where_a_run_plays_it(
    tmp_path: Path, inside: bool
) -> None:
    marker = tmp_path / "marker"
    line = shlex.join(["sh", "-c", f"""touch {marker}; echo '{{"reward": 0}}'"""])
    sandbox = SANDBOX if inside else SandboxConfig()
    tried = TriedAgent(
        line, "rollout.agent_command", "prompt", "answer", 30.0, 2, 4.0, 64, sandbox
    )
    asyncio.run(check_agent(tried, [{"prompt": "2+3=", "answer": 5}]))
    assert marker.exists() != inside


def test_an_environment_opens_the_sandbox_of_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(ENVIRONMENT)
    records = [
        {"prompt": f"How much is {n} + {7 * n}?", "answer": str(8 * n)} for n in range(1, 4)
    ]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, records)))
    rollout = {
        "environment": f"{tmp_path}/mine.py:Mine",
        "max_turns": 2,
        "sandbox": {"kind": "bubblewrap"},
    }
    configuration = {"data": {"train": f"{tmp_path}/data.jsonl"}, "rollout": rollout}
    (tmp_path / "mine.yaml").write_text(
        json.dumps(configuration | {"reward": {"function": ""}})
    )
    assert main(["--quick", f"{tmp_path}/mine.yaml"]) == 0
    findings = json.loads((tmp_path / "certificate.json").read_text())["findings"]
    assert [row["name"] for row in findings if row["name"].startswith("environment.")] == []
