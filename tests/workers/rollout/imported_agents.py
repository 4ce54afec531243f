"""`stock_agents` in a process that has imported what its forks use: each fork took 2.3 CPU seconds, mostly for
anthropic. The tests' own process does not import it.
"""

from typing import Any

import anthropic.resources.messages  # noqa: F401
import openai.resources.chat
import openai.resources.completions
import openai.resources.responses  # noqa: F401

from tests.workers.rollout import stock_agents


async def run(record: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    return await stock_agents.run(record, base_url, api_key)
