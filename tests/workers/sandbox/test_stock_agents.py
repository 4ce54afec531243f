"""Five stock agents, each in a bubblewrap sandbox, against a stand-in for the gateway."""

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.workers.agents.chat_server import ChatRequest, serve_chats
from tests.workers.sandbox.conftest import needs_bubblewrap
from workers.agents.processes import session_variables
from workers.batch.score import Score
from workers.config.sandbox import SandboxConfig
from workers.sandbox.pools import SandboxAgentPool

PACKAGES = next(path for path in sys.path if path.endswith("site-packages"))
pytestmark = [needs_bubblewrap, pytest.mark.slow]  # the imports of five frameworks

CURL = """
curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" -d '{"messages": []}'
curl -sf "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" -d '{"messages": []}'
echo
echo '{"reward": 1}'
"""
AGENTS = '''
import asyncio, json, os, sys
RECORD = json.load(sys.stdin)
QUESTION = RECORD["question"]


def add(a: int, b: int) -> str:
    """Adds.

    Args:
        a: first
        b: second
    """
    return str(a + b)


def openai_client():
    import openai
    client = openai.OpenAI()
    messages = [{"role": "user", "content": QUESTION}]
    answer = client.chat.completions.create(model="any", messages=messages).choices[0].message
    messages += [answer.model_dump(exclude_none=True), {"role": "tool", "tool_call_id": "1", "content": "5"}]
    return client.chat.completions.create(model="any", messages=messages).choices[0].message.content


def openai_agents():
    from agents import Agent, OpenAIChatCompletionsModel, Runner, function_tool, set_tracing_disabled
    from openai import AsyncOpenAI
    set_tracing_disabled(True)
    model = OpenAIChatCompletionsModel(model="any", openai_client=AsyncOpenAI())
    return asyncio.run(Runner.run(Agent(name="a", model=model, tools=[function_tool(add)]), QUESTION)).final_output


def pydantic_ai():
    from pydantic_ai import Agent
    from pydantic_ai.models.openai import OpenAIChatModel
    return Agent(OpenAIChatModel("any"), tools=[add]).run_sync(QUESTION).output


def smolagents():
    from smolagents import OpenAIServerModel, ToolCallingAgent, tool
    model = OpenAIServerModel("any", api_base=os.environ["OPENAI_BASE_URL"], api_key=os.environ["OPENAI_API_KEY"])
    agent = ToolCallingAgent(tools=[tool(add)], model=model, max_steps=2, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "You are helpful."
    return agent.run(QUESTION)
'''
PROGRAM = """
answer = globals()[sys.argv[1]]()
print(json.dumps({"reward": float("5" in str(answer))}))
"""


class Policy:
    """It calls `add`, and then says the sum."""

    def __init__(self) -> None:
        self.requests = 0

    def answer(self, request: ChatRequest) -> dict[str, Any]:
        assert request.headers["Authorization"] == "Bearer secret"
        self.requests += 1
        if self.requests > 1:
            return {"role": "assistant", "content": "It is 5."}
        function = {"name": "add", "arguments": '{"a": 2, "b": 3}'}
        call = {"id": "1", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}


@pytest.mark.parametrize(
    "name", ["curl", "openai_client", "openai_agents", "pydantic_ai", "smolagents"]
)
def test_a_stock_agent_works_in_a_sandbox(name: str, tmp_path: Path) -> None:
    for folder in [tmp_path, *tmp_path.parents[:3]]:
        folder.chmod(0o755)
    (tmp_path / "agent.sh").write_text(CURL)
    (tmp_path / "agent.py").write_text(AGENTS + PROGRAM)
    line = f"env PYTHONPATH={PACKAGES} python3 {tmp_path}/agent.py {name}"
    if name == "curl":
        line = f"sh {tmp_path}/agent.sh"
    settings = SandboxConfig(
        kind=f"bubblewrap:{PACKAGES}:{tmp_path}",
        memory_gib=4.0,
        processes=128,
        command_timeout_s=1.0,
    )

    policy = Policy()

    async def play(url: str) -> Score | None:
        pool = SandboxAgentPool(line, 90.0, sandbox=settings, memory_gib=8.0, processes=256)
        try:
            variables = session_variables(url, url.removesuffix("/v1"), "secret")
            return await pool.run({"question": "What is 2 + 3?"}, variables)
        finally:
            await pool.stop()

    with serve_chats(policy.answer) as url:
        score = asyncio.run(play(url))
    assert score is not None and score.reward == 1.0 and policy.requests >= 2
