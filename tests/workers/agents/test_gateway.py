"""Agents' sessions over HTTP, with stock clients and a real engine on a CPU, against the engine's own
records.

Only here are ids and log-probs of every API's turns compared with the
engine's.
"""

import asyncio
import json
import socket
import time
from collections.abc import Iterator
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
    client: openai.AsyncOpenAI, messages: Any, *, stream: bool, **options: Any
) -> Any:
    if not stream:
        return (
            (
                await client.chat.completions.create(
                    model="any", messages=messages, **options
                )
            )
            .choices[0]
            .message
        )
    async with client.chat.completions.stream(
        model="any", messages=messages, **options
    ) as events:
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


THOUGHT = "I add 3 and 5."
ANSWER_OF_ANTHROPIC = [
    {"type": "thinking", "thinking": THOUGHT, "signature": ""},
    {"type": "text", "text": "It is 8."},
]
REASONING_OF_RESPONSES = {
    "type": "reasoning",
    "id": "r",
    "summary": [],
    "content": [{"type": "reasoning_text", "text": THOUGHT}],
}


@pytest.mark.parametrize(
    ("route", "body"),
    [
        *(
            (
                "chat/completions",
                {
                    "messages": [
                        *QUESTION,
                        {"role": "assistant", "content": "It is 8.", name: THOUGHT},
                    ]
                },
            )
            for name in ("reasoning", "reasoning_content", "thinking")
        ),
        (
            "messages",
            {
                "messages": [
                    *QUESTION,
                    {"role": "assistant", "content": ANSWER_OF_ANTHROPIC},
                ]
            },
        ),
        (
            "responses",
            {
                "input": [
                    *QUESTION,
                    REASONING_OF_RESPONSES,
                    {"role": "assistant", "content": "It is 8."},
                ]
            },
        ),
    ],
    ids=["reasoning", "reasoning_content", "thinking", "Anthropic", "Responses"],
)
def test_thoughts_of_a_request_reach_the_field_that_the_template_reads(
    served: Served, route: str, body: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    access: Access = served.call("open", name := f"thoughts {request.node.callspec.id}")
    sent = {"model": "any", "max_tokens": 4, "max_output_tokens": 4} | body
    headers = {"authorization": f"Bearer {access.key}"}
    answer = httpx.post(
        f"{access.base_url}/{route}", json=sent, headers=headers, timeout=60
    )
    assert answer.status_code == 200, answer.text
    ((_, prompt),) = served.nodes(name)
    assert f"<think>\n{THOUGHT}\n</think>\n\nIt is 8." in served.tokenizer.decode(
        prompt.tolist()
    )


@pytest.mark.parametrize("stream", [False, True])
def test_turns_continue_by_their_ids_and_are_what_the_engine_sampled(
    served: Served, stream: bool
) -> None:
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


async def use_responses(access: Access, stream: bool) -> None:
    client = openai.AsyncOpenAI(base_url=access.base_url, api_key=access.key, max_retries=0)
    items: list[Any] = list(QUESTION)
    options: Any = {"model": "any", "tools": [{"type": "function", **ADD}], "store": False}
    for _ in range(4):
        if stream:
            async with client.responses.stream(input=items, **options) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_response()
        else:
            answer = await client.responses.create(input=items, **options)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        outputs = [
            {"type": "function_call_output", "call_id": call.call_id, "output": "8"}
            for call in calls
        ]
        items += outputs or [{"role": "user", "content": "Sure?"}]


async def use_anthropic(access: Access, stream: bool) -> None:
    import anthropic  # for 1.3 CPU s, in the processes that use it

    client = anthropic.AsyncAnthropic(
        base_url=access.session_url, api_key=access.key, max_retries=0
    )
    options: Any = {
        "model": "any",
        "tools": [ADD_OF_ANTHROPIC],
        "max_tokens": 2000,
        "system": "Be brief.",
    }
    messages: list[Any] = list(QUESTION)
    for _ in range(4):
        if stream:
            async with client.messages.stream(messages=messages, **options) as events:
                answer = await events.get_final_message()
        else:
            answer = await client.messages.create(messages=messages, **options)
        uses = [block for block in answer.content if block.type == "tool_use"]
        messages += [
            {
                "role": "assistant",
                "content": [
                    block.model_dump(exclude_none=True) for block in answer.content
                ],
            }
        ]
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": "8"} for use in uses
        ]
        messages += [{"role": "user", "content": results or "Sure?"}]
    del options["max_tokens"]
    count = await client.messages.count_tokens(messages=messages, **options)
    assert count.input_tokens > 100


async def use_completions(access: Access, stream: bool) -> None:
    client = openai.AsyncOpenAI(base_url=access.base_url, api_key=access.key, max_retries=0)
    text = "What is"
    for _ in range(4):
        answer: Any = await client.completions.create(
            model="any", prompt=text, max_tokens=9, stream=stream
        )
        text += (
            "".join([chunk.choices[0].text async for chunk in answer])
            if stream
            else answer.choices[0].text
        )
        text += " and"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("use", [use_responses, use_anthropic, use_completions])
def test_other_apis_continue_by_ids_too(served: Served, use: Any, stream: bool) -> None:
    names = [f"{use.__name__}{stream}{number}" for number in range(3)]

    async def play() -> None:
        await asyncio.gather(*[use(served.call("open", name), stream) for name in names])

    asyncio.run(play())
    for name in names:
        assert [node.parent for node, _ in served.nodes(name)] == [-1, 0, 1, 2]


@pytest.mark.parametrize(("asked", "most"), [({}, 4), ({"stream_interval": 1}, 18)])
def test_a_stream_comes_in_parts_of_several_tokens(
    served: Served, asked: dict[str, int], most: int
) -> None:
    client = served.client(f"parts{most}", min_new_tokens=16)

    async def parts() -> int:
        options: dict[str, Any] = {"max_tokens": 16, "stream": True, "extra_body": asked}
        answer = await client.completions.create(model="any", prompt="What is", **options)
        return len([chunk async for chunk in answer])

    assert most // 2 < asyncio.run(parts()) <= most


def test_several_answers_to_one_request_are_turns_of_their_own(served: Served) -> None:
    client, options = (
        served.client("several"),
        {"model": "any", "messages": QUESTION, "tools": TOOLS},
    )

    async def play() -> None:
        whole: Any = await client.chat.completions.create(n=3, **options)
        async for _ in await client.chat.completions.create(n=2, stream=True, **options):
            pass
        for choice in whole.choices:
            message = choice.message
            await ask(
                client,
                [*QUESTION, message.model_dump(exclude_none=True), *answers(message)],
                stream=False,
            )
        prompts: Any = [[5, 6, 7], [8, 9]]
        await client.completions.create(model="any", prompt=prompts, n=2, max_tokens=3)

    asyncio.run(play())
    found = [node for node, _ in served.nodes("several")]
    assert [node.parent for node in found] == [-1] * 5 + [-1] * 3 + [
        -1
    ] * 4  # without tools: other prompts
    assert len({node.response.ids.tobytes() for node in found[:5]}) > 1
    assert len({name for node in found for name in node.names}) == 6


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
            "context length",
            {"messages": [{"role": "user", "content": "x " * 3000}]},
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
        asyncio.run(ask(served.client(name), QUESTION, stream=False, tools=tools, **others))
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
    first = post()
    assert post(**{"x-stainless-retry-count": "1"}) == first
    other = post(**{"idempotency-key": "k"})
    assert other != first and post(**{"idempotency-key": "k"}) == other
    with httpx.stream("POST", url, json=ASKED | {"stream": True}, headers=key) as stream:
        next(stream.iter_lines())  # and never comes back
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


def test_closing_a_session_aborts_its_requests(served: Served) -> None:
    access = served.call("open", "closed", **LONG)
    url, key = (
        f"{access.base_url}/chat/completions",
        {"authorization": f"Bearer {access.key}"},
    )
    with httpx.stream(
        "POST", url, json=ASKED | {"stream": True}, headers=key, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.call("close", "closed")
        assert any("error" in line for line in lines)
    assert served.call("nodes", "closed") == [] and served.call("of_engine", "closed") == []
    assert served.call("left")[0] == 0
    assert httpx.post(url, json=ASKED, headers=key).status_code == 401


def test_weights_that_change_within_a_turn_are_told_by_token(served: Served) -> None:
    access = served.call("open", "updated", **LONG)
    url, key = (
        f"{access.base_url}/chat/completions",
        {"authorization": f"Bearer {access.key}"},
    )
    with httpx.stream(
        "POST", url, json=ASKED | {"stream": True}, headers=key, timeout=60
    ) as stream:
        lines = stream.iter_lines()
        next(lines)
        served.call("update_weights", pack_weights(served.model.state_dict().items()), 5)
        list(lines)
    ((node, _),) = served.call("nodes", "updated")
    assert sorted(set(node.response.versions.tolist())) == [0, 5]
    assert (np.diff(node.response.versions) >= 0).all() and len(
        node.response.versions
    ) == 1500


@pytest.mark.parametrize("stream", [False, True])
def test_a_record_answers_again_without_sampling(served: Served, stream: bool) -> None:
    def played(name: str, **options: Any) -> list[Any]:
        client = served.client(name, **options)

        async def play() -> list[Any]:
            messages, found = list(QUESTION), []
            for _ in range(4):
                message = await ask(
                    client, messages, stream=stream if options else False, tools=TOOLS
                )
                calls = [call.function.arguments for call in message.tool_calls or []]
                found.append((message.content or "", [json.loads(call) for call in calls]))
                messages += [message.model_dump(exclude_none=True), *answers(message)]
            return found

        return asyncio.run(play())

    first = played(f"before{stream}")
    record = served.call("record", f"before{stream}")
    assert (
        played(f"again{stream}", record=replace(record, nodes=record.nodes[:3]), seed=8)[:3]
        == first[:3]
    )
    assert [node.replayed for node, _ in served.nodes(f"again{stream}")] == [
        True,
        True,
        True,
        False,
    ]
    assert len(served.call("of_engine", f"again{stream}")) == 1


def test_a_session_keeps_to_its_limits(served: Served) -> None:
    access = served.call(
        "open", "limited", max_turns=17, max_new_tokens=100, min_new_tokens=100
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
            asked = [
                {"model": "any", "messages": QUESTION, "user": str(number)}
                for number in range(20)
            ]
            return [
                each.status_code
                for each in await asyncio.gather(
                    *[client.post(url, json=one) for one in asked]
                )
            ]

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

    async def play(seat: str, reward: float) -> None:
        headers = {"X-Session-ID": seat}
        client = openai.AsyncOpenAI(
            base_url=access.base_url,
            api_key=access.key,
            max_retries=0,
            default_headers=headers,
        )
        await chat(client, 2, stream=False)
        async with httpx.AsyncClient(
            headers={"authorization": f"Bearer {access.key}"}
        ) as http:
            body = {"reward": reward, "response_id": seat}
            answer = await http.post(f"{access.session_url}/reward", json=body)
            assert answer.status_code == 200

    asyncio.run(play("solver", 1.0))
    asyncio.run(play("judge", 3.0))
    nodes = [node for node, _ in served.nodes("seats")]
    assert [node.names[-1] for node in nodes] == ["solver", "solver", "judge", "judge"]
    assert served.call("told", "seats")["value"] == 2.0
