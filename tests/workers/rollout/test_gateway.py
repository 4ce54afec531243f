"""Agents' sessions over HTTP, with stock clients and a real engine on a CPU, against the engine's own records."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
import torch
from transformers import Qwen2ForCausalLM

from tests.workers.rollout import agent_model
from tests.workers.rollout.gateway_actor import GatewayActor
from workers.config import GatewayConfig, ModelConfig, RolloutConfig
from workers.rollout.gateway import Access
from workers.rollout.session import Node

LOG_PROB_TOLERANCE = 3e-5  # float32, two implementations
NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
ADD: Any = {"name": "add", "description": "Adds.", "parameters": NUMBERS}
TOOLS: Any = [{"type": "function", "function": ADD}]
QUESTION: Any = [{"role": "user", "content": "What is 3 plus 5?"}]


class Served:
    """An engine with its gateway."""

    def __init__(self, model: Path) -> None:
        rollout = RolloutConfig(
            threads=1, cpu_kv_cache_gib=0.125, gateway=GatewayConfig(max_request_mib=1, max_concurrent_requests=16)
        )
        options = {"num_cpus": 1, "max_concurrency": 100}
        settings = {"index": 0, "placement": "shared_memory", "max_model_tokens": 2048, "seed": 0}
        self.actor = (
            ray.remote(GatewayActor).options(**options).remote(ModelConfig(path=str(model)), rollout, **settings)
        )
        self.model = Qwen2ForCausalLM.from_pretrained(model).eval()
        self.call("start")
        self.url = self.call("serve")

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return ray.get(getattr(self.actor, method).remote(*arguments, **named), timeout=120)

    def client(self, name: str, **options: Any) -> openai.AsyncOpenAI:
        access: Access = self.call("open", name, **options)
        return openai.AsyncOpenAI(base_url=access.base_url, api_key=access.key, max_retries=0)

    def nodes(self, name: str) -> list[tuple[Node, np.ndarray]]:
        """The session's turns, each with its prompt. They are what the engine sampled, each once, ids and log-probs."""
        found = self.call("nodes", name)
        sampled = sorted(self.call("of_engine", name))
        assert sorted(node.response.ids.tolist() for node, _ in found if not node.replayed) == sampled
        prompts = {node.number: prompt for node, prompt in found}
        for node, prompt in found:
            if node.parent >= 0:
                parent = next(each for each, _ in found if each.number == node.parent)
                before = np.concatenate([prompts[parent.number], parent.response.ids])
                np.testing.assert_array_equal(prompt[: len(before)], before)
            ids = torch.tensor(np.concatenate([prompt, node.response.ids])[None], dtype=torch.int64)
            with torch.no_grad():
                logits = self.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logits[torch.arange(len(node.response.ids)), ids[0, len(prompt) :]]
            np.testing.assert_allclose(node.response.log_probs, expected, atol=LOG_PROB_TOLERANCE)
        return found


@pytest.fixture(scope="module")
def served(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(agent_model.save(tmp_path_factory.mktemp("model") / "agent"))
    yield found
    ray.kill(found.actor)


async def ask(client: openai.AsyncOpenAI, messages: Any, *, stream: bool, **options: Any) -> Any:
    if not stream:
        return (await client.chat.completions.create(model="any", messages=messages, **options)).choices[0].message
    async with client.chat.completions.stream(model="any", messages=messages, **options) as events:
        async for _ in events:
            pass
        return (await events.get_final_completion()).choices[0].message


def answers(message: Any) -> list[dict[str, Any]]:
    calls = message.tool_calls or []
    found = [{"role": "tool", "tool_call_id": call.id, "content": "8"} for call in calls]
    return found or [{"role": "user", "content": "Sure?"}]


async def chat(client: openai.AsyncOpenAI, turns: int, *, stream: bool) -> None:
    messages = list(QUESTION)
    for _ in range(turns):
        message = await ask(client, messages, stream=stream, tools=TOOLS, temperature=0.3)
        messages += [message.model_dump(exclude_none=True), *answers(message)]


@pytest.mark.parametrize("stream", [False, True])
def test_turns_continue_by_their_ids_and_are_what_the_engine_sampled(served: Served, stream: bool) -> None:
    names = [f"chat{stream}{number}" for number in range(6)]
    clients = [served.client(name) for name in names]

    async def play() -> None:
        await asyncio.gather(*[chat(client, 5, stream=stream) for client in clients])

    asyncio.run(play())
    again = 0
    for name in names:
        found = [node for node, _ in served.nodes(name)]
        assert [node.parent for node in found] == [-1, 0, 1, 2, 3]
        assert all(node.received for node in found)
        again += sum("tool_calls" in node.said for node in found)
        told = served.call("told", name)
        assert told["kept"] == 5 and len(told["rows"]) == 1
    assert again > 5  # calls are among them


def test_a_wrong_key_another_session_and_unlisted_routes_are_refused(served: Served) -> None:
    mine, other = served.call("open", "mine"), served.call("open", "other")
    with httpx.Client(headers={"authorization": f"Bearer {mine.key}"}) as client:
        for path, status in {
            f"{mine.session_url}/v1/models": 200,
            f"{mine.session_url}": 200,
            f"{other.session_url}/v1/models": 401,
            f"{served.url}/s/unknown/v1/models": 401,
            f"{mine.session_url}/metrics": 404,
            f"{served.url}/v1/models": 404,
            f"{served.url}/metrics": 404,
        }.items():
            answer = client.get(path)
            assert answer.status_code == status, path
            assert status == 200 or answer.json()["error"]["message"]
        served.call("close", "mine")
        assert client.get(f"{mine.session_url}/v1/models").status_code == 410
