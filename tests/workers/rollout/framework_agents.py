"""Agents of openai-agents, pydantic-ai and smolagents, with `stock_agents`' tasks. Their imports take
seconds.
"""

import asyncio
from contextlib import suppress
from typing import Any

from agents import Agent as OpenAIAgent
from agents import (
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from agents.exceptions import AgentsException
from pydantic_ai import Agent as PydanticAgent
from pydantic_ai.exceptions import AgentRunError
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.models.openai import OpenAIResponsesModel as PydanticResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.openai import OpenAIProvider
from smolagents import OpenAIServerModel, ToolCallingAgent, tool
from smolagents.utils import AgentError

from tests.workers.rollout import stock_agents
from tests.workers.rollout.stock_agents import AGENTS, MODEL, Chats

set_tracing_disabled(True)


@function_tool
def add(a: int, b: int) -> str:
    return str(a + b)


@tool
def adds(a: int, b: int) -> int:
    """Adds.

    Args:
        a: first
        b: second
    """
    return a + b


async def openai_agents(
    chats: Chats, model: Any = OpenAIChatCompletionsModel, *, stream: bool = False
) -> float:
    agent = OpenAIAgent(
        name="adder",
        instructions="You are helpful.",
        model=model(model=MODEL, openai_client=chats.openai),
        tools=[add],
        model_settings=ModelSettings(max_tokens=400, temperature=0.7, store=False),
    )
    for question in (chats.question["content"], "And 1 plus 1?"):
        # The policy may call what does not exist, or never end.
        with suppress(AgentsException):
            if stream:
                running = Runner.run_streamed(agent, question, max_turns=3)
                async for _ in running.stream_events():
                    pass
            else:
                await Runner.run(
                    agent,
                    question,
                    max_turns=3,
                    run_config=RunConfig(tracing_disabled=True),
                )
    return 1.0


async def openai_agents_streaming(chats: Chats) -> float:
    return await openai_agents(chats, stream=True)


async def openai_agents_responses(chats: Chats) -> float:
    return await openai_agents(chats, OpenAIResponsesModel)


async def pydantic_ai(chats: Chats, model: Any = None) -> float:
    provider = OpenAIProvider(openai_client=chats.openai)
    model = model or OpenAIChatModel(MODEL, provider=provider)
    settings: Any = {"max_tokens": 400, "temperature": 0.7}
    agent = PydanticAgent(
        model, instructions="You are helpful.", model_settings=settings, retries=2
    )

    @agent.tool_plain
    def add(a: int, b: int) -> str:
        return str(a + b)

    with suppress(AgentRunError):
        run = await agent.run(chats.question["content"])
        await agent.run("Sure?", message_history=run.all_messages())
    return 1.0


async def pydantic_ai_anthropic(chats: Chats) -> float:
    return await pydantic_ai(
        chats,
        AnthropicModel(MODEL, provider=AnthropicProvider(anthropic_client=chats.anthropic)),
    )


async def pydantic_ai_responses(chats: Chats) -> float:
    return await pydantic_ai(
        chats,
        PydanticResponsesModel(MODEL, provider=OpenAIProvider(openai_client=chats.openai)),
    )


async def smolagents(chats: Chats) -> float:
    model = OpenAIServerModel(
        MODEL, api_base=chats.base_url, api_key=chats.key, max_tokens=400
    )
    agent = ToolCallingAgent(tools=[adds], model=model, max_steps=3, verbosity_level=0)
    agent.prompt_templates["system_prompt"] = "You are helpful."
    with suppress(AgentError):
        await asyncio.to_thread(agent.run, chats.question["content"])
    return 1.0


FRAMEWORKS = (
    *(openai_agents, openai_agents_streaming, openai_agents_responses),
    *(pydantic_ai, pydantic_ai_anthropic, pydantic_ai_responses, smolagents),
)
AGENTS |= {each.__name__: each for each in FRAMEWORKS}


async def run(record: dict[str, Any], base_url: str, api_key: str) -> Any:
    return await stock_agents.run(record, base_url, api_key)
