"""Agents' sessions over HTTP, with stock clients and a real engine on a CPU, against the engine's own
records.

Every API's turns are compared with the engine's by `tests/workers/rollout/test_stock_agents.py`.
"""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import ray
import torch
from transformers import AutoTokenizer, Qwen2ForCausalLM

from tests.workers.rollout import agent_model
from tests.workers.rollout.gateway_actor import GatewayActor
from workers.agents.gateway import Access
from workers.config.roles import GatewayConfig, ModelConfig, RolloutConfig
from workers.engine.session_record import Node
from workers.engine.weights.weight_transfer import pack_weights

LOG_PROB_TOLERANCE = 3e-5  # float32, two implementations
NUMBERS = {
    "type": "object",
    "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
}
ADD: Any = {"name": "add", "description": "Adds.", "parameters": NUMBERS}
TOOLS: Any = [{"type": "function", "function": ADD}]
ADD_OF_ANTHROPIC = {"name": "add", "input_schema": NUMBERS}
PICTURE_OF_ANTHROPIC = {
    "type": "image",
    "source": {"type": "base64", "media_type": "image/png", "data": "AAAA"},
}
QUESTION: Any = [{"role": "user", "content": "What is 3 plus 5?"}]


class Served:
    """An engine with its gateway."""

    def __init__(self, model: Path) -> None:
        rollout = RolloutConfig(
            threads=1,
            cpu_kv_cache_gib=0.125,
            gateway=GatewayConfig(max_request_mib=1, max_concurrent_requests=16),
        )
        options = {"num_cpus": 1, "max_concurrency": 100}
        settings = {
            "index": 0,
            "placement": "shared_memory",
            "max_model_tokens": 2048,
            "seed": 0,
        }
        self.actor = (
            ray.remote(GatewayActor)
            .options(**options)
            .remote(ModelConfig(path=str(model)), rollout, **settings)
        )
        self.model = Qwen2ForCausalLM.from_pretrained(model).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(model)
        self.call("start")
        self.url = self.call("serve")

    def call(self, method: str, *arguments: Any, **named: Any) -> Any:
        return ray.get(getattr(self.actor, method).remote(*arguments, **named), timeout=120)

    def client(self, name: str, **options: Any) -> openai.AsyncOpenAI:
        access: Access = self.call("open", name, **options)
        return openai.AsyncOpenAI(
            base_url=access.base_url, api_key=access.key, max_retries=0
        )

    def nodes(self, name: str) -> list[tuple[Node, np.ndarray]]:
        """The session's turns, each with its prompt. They are what the engine sampled, each once, ids and
        log-probs.
        """
        found = self.call("nodes", name)
        sampled = sorted(self.call("of_engine", name))
        assert (
            sorted(node.response.ids.tolist() for node, _ in found if not node.replayed)
            == sampled
        )
        prompts = {node.number: prompt for node, prompt in found}
        for node, prompt in found:
            if node.parent >= 0:
                parent = next(each for each, _ in found if each.number == node.parent)
                before = np.concatenate([prompts[parent.number], parent.response.ids])
                np.testing.assert_array_equal(prompt[: len(before)], before)
            ids = torch.tensor(
                np.concatenate([prompt, node.response.ids])[None], dtype=torch.int64
            )
            with torch.no_grad():
                logits = self.model(ids).logits[0, len(prompt) - 1 : -1].log_softmax(-1)
            expected = logits[torch.arange(len(node.response.ids)), ids[0, len(prompt) :]]
            np.testing.assert_allclose(
                node.response.log_probs, expected, atol=LOG_PROB_TOLERANCE
            )
        return found


@pytest.fixture(scope="module")
def served(ray_session: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    found = Served(agent_model.save(tmp_path_factory.mktemp("model") / "agent"))
    yield found
    ray.kill(found.actor)


async def ask(
    client: openai.AsyncOpenAI, messages: Any, *, stream: bool = False, **options: Any
) -> Any:
    request = {"model": "any", "messages": messages, **options}
    if not stream:
        return (await client.chat.completions.create(**request)).choices[0].message
    async with client.chat.completions.stream(**request) as events:
        async for _ in events:
            pass
        return (await events.get_final_completion()).choices[0].message


async def converse(
    client: openai.AsyncOpenAI, turns: int, *, stream: bool = False
) -> list[Any]:
    """Return the policy's messages, each after an answer to the one before."""
    messages = list(QUESTION)
    said = []
    for _ in range(turns):
        message = await ask(client, messages, stream=stream, tools=TOOLS)
        said.append(message)
        messages += [message.model_dump(exclude_none=True), *answers(message)]
    return said


def answers(message: Any) -> list[dict[str, Any]]:
    calls = message.tool_calls or []
    found = [{"role": "tool", "tool_call_id": call.id, "content": "8"} for call in calls]
    return found or [{"role": "user", "content": "Sure?"}]


THOUGHT = "I add 3 and 5."
ANSWER = {"role": "assistant", "content": "It is 8."}
BLOCKS = [
    {"type": "thinking", "thinking": THOUGHT, "signature": ""},
    {"type": "text", "text": "It is 8."},
]
REASONING = {
    "type": "reasoning",
    "id": "r",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": THOUGHT}],
}


@pytest.mark.parametrize(
    ("route", "history"),
    [
        ("chat/completions", [*QUESTION, ANSWER | {"reasoning": THOUGHT}]),
        ("messages", [*QUESTION, ANSWER | {"content": BLOCKS}]),
        ("responses", [*QUESTION, REASONING, ANSWER]),
    ],
)
def test_thoughts_of_a_request_reach_the_field_that_the_template_reads(
    served: Served, route: str, history: list[Any]
) -> None:
    name = f"thoughts of {Path(route).name}"
    access: Access = served.call("open", name)
    body = {"model": "any", "max_tokens": 4, "messages": history, "input": history}
    answer = httpx.post(
        f"{access.base_url}/{route}",
        json=body,
        headers={"x-api-key": access.key},
        timeout=60,
    )
    assert answer.status_code == 200, answer.text
    ((_, prompt),) = served.nodes(name)
    thought = f"<think>\n{THOUGHT}\n</think>\n\nIt is 8."
    assert thought in served.tokenizer.decode(prompt.tolist())


def test_a_wrong_key_another_session_and_unlisted_routes_are_refused(
    served: Served,
) -> None:
    mine, other = served.call("open", "mine"), served.call("open", "other")
    with httpx.Client(headers={"authorization": f"Bearer {mine.key}"}) as client:
        for path, status in {
            f"{mine.session_url}/v1/models": 200,
            f"{mine.session_url}": 404,
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
        assert client.get(f"{mine.session_url}/v1/models").status_code == 401


@pytest.mark.parametrize(("options", "most"), [({}, 4), ({"stream_interval": 1}, 18)])
def test_a_stream_comes_in_parts_of_several_tokens_and_its_text_is_extended(
    served: Served, options: dict[str, int], most: int
) -> None:
    async def texts(client: Any, prompt: str) -> list[str]:
        answer = await client.completions.create(
            model="any", prompt=prompt, max_tokens=16, stream=True, extra_body=options
        )
        return [chunk.choices[0].text async for chunk in answer]

    async def play(client: Any) -> int:
        parts = await texts(client, "What is")
        await texts(client, "What is" + "".join(parts) + " and")
        return len(parts)

    def count_parts(attempt: int) -> int:
        name = f"parts{most}-{attempt}"
        count = asyncio.run(play(served.client(name, min_new_tokens=16)))
        assert [node.parent for node, _ in served.call("nodes", name)] == [-1, 0]
        assert count <= most
        return count

    # A part has all that came since the last, more where other processes have the core.
    assert any(count_parts(attempt) > most // 2 for attempt in range(20))


def test_several_answers_to_one_request_are_turns_of_their_own(served: Served) -> None:
    client = served.client("several")
    options: Any = {"model": "any", "messages": QUESTION, "tools": TOOLS}

    async def play() -> None:
        whole: Any = await client.chat.completions.create(n=3, **options)
        async for _ in await client.chat.completions.create(n=2, stream=True, **options):
            pass
        for choice in whole.choices:
            said = choice.message.model_dump(exclude_none=True)
            await ask(client, [*QUESTION, said, *answers(choice.message)])
        prompts: Any = [[5, 6, 7], [8, 9]]
        await client.completions.create(model="any", prompt=prompts, n=2, max_tokens=3)

    asyncio.run(play())
    nodes = [node for node, _ in served.nodes("several")]
    assert [node.parent for node in nodes] == [-1] * 12  # without tools: other prompts
    assert len({node.response.ids.tobytes() for node in nodes[:5]}) > 1
    assert len({name for node in nodes for name in node.names}) == 6


NAMED = {"type": "function", "function": {"name": "add"}}
FORCED = "algorithm.loss.rollout_correction"
OWN = "rollout.sampling"
PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}


@pytest.mark.parametrize(
    ("route", "said", "body"),
    [
        ("chat/completions", FORCED, {"tools": TOOLS, "tool_choice": NAMED}),
        ("chat/completions", FORCED, {"response_format": {"type": "json_object"}}),
        ("chat/completions", FORCED, {"structured_outputs": {"regex": "a+"}}),
        ("chat/completions", OWN, {"guided_json": {"type": "object"}}),
        ("chat/completions", OWN, {"prompt_logprobs": 1}),
        ("chat/completions", OWN, {"use_beam_search": True, "n": 2}),
        ("chat/completions", OWN, {"echo": True}),
        ("chat/completions", OWN, {"logit_bias": {"5": 10}}),
        ("chat/completions", "chat template", {"chat_template": "x"}),
        (
            "chat/completions",
            "images",
            {"messages": [{"role": "user", "content": [PICTURE]}]},
        ),
        (
            "chat/completions",
            "Unicode",
            {"messages": [{"role": "user", "content": "\ud800"}]},
        ),
        ("chat/completions", "rollout.max_turns", {"n": 101}),
        ("chat/completions", "messages", {"messages": []}),
        ("chat/completions", "", b'{"model": "any", "mess'),
        ("chat/completions", "", b'{"messages": ' + b"[" * 100_000),
        (
            "responses",
            FORCED,
            {
                "input": "x",
                "text": {"format": {"type": "json_schema", "name": "a", "schema": {}}},
            },
        ),
        (
            "messages",
            FORCED,
            {
                "max_tokens": 9,
                "tools": [ADD_OF_ANTHROPIC],
                "tool_choice": {"type": "tool", "name": "add"},
            },
        ),
        (
            "messages",
            "images",
            {
                "max_tokens": 9,
                "messages": [{"role": "user", "content": [PICTURE_OF_ANTHROPIC]}],
            },
        ),
        ("messages", "", b"{"),
        ("completions", "vocabulary", {"prompt": [100_000]}),
        ("completions", "suffix", {"prompt": "x", "suffix": "y"}),
    ],
)
def test_what_a_session_cannot_do_is_refused_in_the_apis_form(
    served: Served, route: str, said: str, body: dict[str, Any] | bytes
) -> None:
    access = served.call("open", "refused")
    if isinstance(body, dict):
        body = json.dumps({"model": "any", "messages": QUESTION} | body).encode()
    answer = httpx.post(
        f"{access.base_url}/{route}", content=body, headers={"x-api-key": access.key}
    )
    assert answer.status_code == 400
    found = answer.json()
    assert said in found["error"]["message"] and found["error"]["type"]
    assert found.get("type") == ("error" if route == "messages" else None)
    assert served.nodes("refused") == [] and served.call("left")[0] == 0


def test_strict_tools_and_sampling_options_of_clients_change_nothing(
    served: Served,
) -> None:
    texts = []
    for name, options in {"plain": {}, "strict": {"strict": True}}.items():
        tools: Any = [{"type": "function", "function": ADD | options}]
        own = {"temperature": 0.01, "top_p": 0.1, "seed": 3, "tool_choice": "required"}
        others: Any = own if options else {}
        asyncio.run(ask(served.client(name), QUESTION, tools=tools, **others))
        texts.append([node.response.ids.tolist() for node, _ in served.nodes(name)])
    assert texts[0] == texts[1]


LONG: Any = {"max_new_tokens": 1500, "min_new_tokens": 1500}
ASKED = {"model": "any", "messages": QUESTION}


def test_a_retry_reads_the_answer_that_its_client_left_and_an_abandoned_one_is_dropped(
    served: Served,
) -> None:
    tokens_of_answer = 800
    access = served.call(
        "open", "retried", max_new_tokens=tokens_of_answer, min_new_tokens=tokens_of_answer
    )
    url, key = (
        f"{access.base_url}/chat/completions",
        {"authorization": f"Bearer {access.key}"},
    )

    def post(**headers: str) -> str:
        return str(
            httpx.post(url, json=ASKED, headers=key | headers, timeout=60.0).json()["id"]
        )

    address = httpx.URL(access.base_url)
    body = httpx.Request("POST", url, json=ASKED).read().decode()
    request = (
        f"POST {address.path}/chat/completions HTTP/1.1\r\nhost: {address.host}\r\n"
        f"authorization: Bearer {access.key}\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n{body}"
    )

    # Not with a client's time-out: a slow machine sent the retry before the request, or slept through its answer.
    with socket.create_connection((address.host, address.port)) as left:
        left.sendall(request.encode())
        while served.call("count_unfinished") == 0:
            time.sleep(0.02)
    # Before the gateway has seen its client leave, the same request is another one.
    while served.call("count_abandoned", "retried") == 0:
        time.sleep(0.02)
    first = post()
    assert post(**{"x-stainless-retry-count": "1"}) == first
    other = post(**{"idempotency-key": "k"})
    assert other != first and post(**{"idempotency-key": "k"}) == other
    with begun_stream(access):
        pass  # and never comes back
    for _ in range(100):
        nodes = [node for node, _ in served.call("nodes", "retried")]
        if len(nodes) == 3:
            break
        time.sleep(0.1)
    assert [(node.received, node.joined, len(node.response.ids)) for node in nodes] == [
        (True, 2, tokens_of_answer),
        (True, 1, tokens_of_answer),
        (False, 0, tokens_of_answer),
    ]
    assert served.call("told", "retried")["kept"] == 2
    assert len(served.call("of_engine", "retried")) == 3


@contextmanager
def begun_stream(access: Access) -> Iterator[Iterator[str]]:
    """The lines that follow the first of a streamed answer."""
    with httpx.stream(
        "POST",
        f"{access.base_url}/chat/completions",
        json=ASKED | {"stream": True},
        headers={"x-api-key": access.key},
        timeout=60,
    ) as answer:
        lines = answer.iter_lines()
        next(lines)
        yield lines


def test_closing_a_session_aborts_its_requests(served: Served) -> None:
    with begun_stream(served.call("open", "closed", **LONG)) as lines:
        served.call("close", "closed")
        assert any("error" in line for line in lines)
    assert served.call("nodes", "closed") == [] and served.call("of_engine", "closed") == []
    assert served.call("left")[0] == 0


def test_weights_that_change_within_a_turn_are_told_by_token(served: Served) -> None:
    with begun_stream(served.call("open", "updated", **LONG)) as lines:
        served.call("update_weights", pack_weights(served.model.state_dict().items()), 5)
        list(lines)
    ((node, _),) = served.call("nodes", "updated")
    assert sorted(set(node.response.versions.tolist())) == [0, 5]
    assert (np.diff(node.response.versions) >= 0).all()
    assert len(node.response.versions) == 1500


@pytest.mark.parametrize("stream", [False, True])
def test_a_record_answers_again_without_sampling(served: Served, stream: bool) -> None:
    def played(name: str, **options: Any) -> list[Any]:
        client = served.client(name, **options)
        messages = asyncio.run(converse(client, 4, stream=bool(options) and stream))
        answers = []
        for message in messages:
            calls = [json.loads(c.function.arguments) for c in message.tool_calls or []]
            answers.append((message.content or "", calls))
        return answers

    first = played(f"before{stream}")
    record = served.call("record", f"before{stream}")
    record = replace(record, nodes=record.nodes[:3])
    assert played(f"again{stream}", record=record, seed=8)[:3] == first[:3]
    nodes = [node for node, _ in served.nodes(f"again{stream}")]
    assert [node.replayed for node in nodes] == [True, True, True, False]
    assert len(served.call("of_engine", f"again{stream}")) == 1


def test_a_session_keeps_to_its_limits(served: Served) -> None:
    access = served.call(
        "open", "limited", max_turns=17, max_new_tokens=500, min_new_tokens=500
    )
    url, key = (
        f"{access.base_url}/chat/completions",
        {"authorization": f"Bearer {access.key}"},
    )

    def post(messages: Any) -> httpx.Response:
        return httpx.post(
            url, json={"model": "any", "messages": messages}, headers=key, timeout=60
        )

    assert post([{"role": "user", "content": "x" * 2**20}]).status_code == 413
    for size in (70_000, 600_000):  # rendered, and not
        assert (
            "context length"
            in post([{"role": "user", "content": "x" * size}]).json()["error"]["message"]
        )
    address = httpx.URL(url)
    with socket.create_connection((address.host, address.port)) as cut:
        head = f"POST {address.path} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {access.key}\r\n"
        cut.sendall(
            f'{head}content-type: application/json\r\ncontent-length: 500\r\n\r\n{{"mess'.encode()
        )

    async def many() -> list[int]:
        async with httpx.AsyncClient(headers=key, timeout=60) as client:
            bodies = [ASKED | {"user": str(number)} for number in range(20)]
            posts = [client.post(url, json=body) for body in bodies]
            return [answer.status_code for answer in await asyncio.gather(*posts)]

    assert sorted(asyncio.run(many())) == [200] * 16 + [429] * 4
    assert post(QUESTION).status_code == 200
    last = post([{"role": "user", "content": "more"}])
    assert (
        last.status_code == 400 and "rollout.max_turns" in last.json()["error"]["message"]
    )
    assert len(served.call("of_engine", "limited")) == 17 and served.call("left")[0] == 0


def test_turns_of_a_seat_are_rewarded_by_its_name(served: Served) -> None:
    """Two seats ask the same, so that the header alone tells them apart."""
    access = served.call("open", "seats")

    for seat, reward in (("solver", 1.0), ("judge", 3.0)):
        client = openai.AsyncOpenAI(
            base_url=access.base_url,
            api_key=access.key,
            max_retries=0,
            default_headers={"X-Session-ID": seat},
        )
        asyncio.run(converse(client, 2))
        answer = httpx.post(
            f"{access.session_url}/reward",
            json={"reward": reward, "response_id": seat},
            headers={"x-api-key": access.key},
        )
        assert answer.status_code == 200
    nodes = [node for node, _ in served.nodes("seats")]
    assert [node.names[-1] for node in nodes] == ["solver", "solver", "judge", "judge"]
    assert served.call("told", "seats")["value"] == 2.0
