"""Requests that no session should answer, or not as asked: the route, the body, and the statuses that may
come back. `tests/workers/agents/test_gateway.py` has those whose refusal has certain words.
"""

import json
from dataclasses import dataclass
from typing import Any

CHAT, TEXT, RESPONSES, MESSAGES = (
    "/v1/chat/completions",
    "/v1/completions",
    "/v1/responses",
    "/v1/messages",
)
ASKED = [{"role": "user", "content": "What is 2 plus 3?"}]
TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
VALID: dict[str, dict[str, Any]] = {
    CHAT: {"model": "m", "messages": ASKED, "tools": [TOOL], "max_tokens": 8},
    TEXT: {"model": "m", "prompt": "What is", "max_tokens": 8},
    RESPONSES: {"model": "m", "input": ASKED, "max_output_tokens": 8},
    MESSAGES: {"model": "m", "messages": ASKED, "max_tokens": 8},
}
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACH5BAEAAAAALAAAAAABAAEAAAIA"
REFUSED, TOO_LARGE, ANSWERED = {400}, {413}, {200}
EITHER = REFUSED | ANSWERED


@dataclass(frozen=True)
class Hostile:
    name: str
    route: str
    body: bytes
    statuses: frozenset[int]

    @property
    def anthropic(self) -> bool:
        return self.route.startswith(MESSAGES)


def case(name: str, route: str, statuses: set[int], **changes: Any) -> Hostile:
    """A valid request with other values."""
    return Hostile(
        name, route, json.dumps(VALID[route] | changes).encode(), frozenset(statuses)
    )


def raw(name: str, body: bytes, route: str = CHAT, statuses: set[int] = REFUSED) -> Hostile:
    return Hostile(name, route, body, frozenset(statuses))


def said(content: Any, role: str = "user") -> list[Any]:
    return [{"role": role, "content": content}]


def images(kind: str, content: Any) -> list[Any]:
    return said([{"type": "text", "text": "What is this?"}, {"type": kind} | content])


DEEP = b"[" * 100_000
CALLED = {
    "role": "assistant",
    "tool_calls": [
        {"id": "c", "type": "function", "function": {"name": "no", "arguments": "{"}}
    ],
}
CASES = [
    # images to a text model
    case(
        "image elsewhere",
        CHAT,
        REFUSED,
        messages=images("image_url", {"image_url": {"url": "http://127.0.0.1:1/x"}}),
    ),
    case(
        "file",
        CHAT,
        REFUSED,
        messages=images("image_url", {"image_url": {"url": "file:///etc/passwd"}}),
    ),
    case(
        "audio",
        CHAT,
        REFUSED,
        messages=images("input_audio", {"input_audio": {"data": "AA==", "format": "wav"}}),
    ),
    case("image", RESPONSES, REFUSED, input=images("input_image", {"image_url": PIXEL})),
    # sizes
    case("10 MB", CHAT, TOO_LARGE, messages=said("x" * 10**7)),
    case("10 MB", MESSAGES, TOO_LARGE, messages=said("x" * 10**7)),
    case("1 MB", CHAT, REFUSED, messages=said("What is 1 plus 1? " * 60_000)),
    case("1 MB of messages", CHAT, REFUSED, messages=said("Sure?") * 25_000),
    case("too long", TEXT, REFUSED, prompt="x " * 5000),
    case("too long", RESPONSES, REFUSED, input="x " * 5000),
    case("too long", MESSAGES, REFUSED, messages=said("x " * 5000)),
    # not JSON, or of other types
    raw("no body", b""),
    raw("no JSON", b"messages=hello"),
    raw("deep", b'{"messages": ' + DEEP, MESSAGES),
    raw(
        "deep in a message",
        json.dumps(VALID[CHAT]).encode()[:-1]
        + b', "metadata": '
        + DEEP[:5000]
        + b"]" * 5000
        + b"}",
        CHAT,
        EITHER,
    ),
    raw("no object", b"[]"),
    raw("null", b"null", RESPONSES),
    raw("not UTF-8", b'{"messages": "\xff\xfe"}'),
    raw(
        "a surrogate",
        json.dumps(VALID[CHAT] | {"messages": said("\ud800")}).encode(),
        CHAT,
        EITHER,
    ),
    raw(
        "a surrogate", json.dumps(VALID[TEXT] | {"prompt": "\ud800"}).encode(), TEXT, EITHER
    ),
    raw(
        "a huge number",
        b'{"model": "m", "messages": [], "max_tokens": 1' + b"0" * 5000 + b"}",
    ),
    case("no messages", MESSAGES, REFUSED, messages=[]),
    case("no input", RESPONSES, REFUSED, input=[]),
    case("messages", CHAT, REFUSED, messages="hello"),
    case("messages", CHAT, REFUSED, messages=[["user", "hello"]]),
    case("null content", CHAT, EITHER, messages=said(None)),
    case("content of a number", CHAT, REFUSED, messages=said(7)),
    case("text of a number", CHAT, REFUSED, messages=said([{"type": "text", "text": 7}])),
    case("a role", CHAT, EITHER, messages=said("hello", "wizard")),
    case("a role", MESSAGES, REFUSED, messages=said("hello", "wizard")),
    case(
        "a tool's answer to nothing",
        CHAT,
        EITHER,
        messages=[{"role": "tool", "tool_call_id": "x", "content": "5"}],
    ),
    case(
        "an unknown tool",
        CHAT,
        EITHER,
        messages=[*ASKED, CALLED, {"role": "tool", "tool_call_id": "c", "content": "5"}],
    ),
    case(
        "calls of nothing",
        CHAT,
        EITHER,
        messages=[*ASKED, {"role": "assistant", "tool_calls": [{}]}, *ASKED],
    ),
    case(
        "calls of a text",
        CHAT,
        EITHER,
        messages=[*ASKED, {"role": "assistant", "tool_calls": "x"}, *ASKED],
    ),
    case("tools", CHAT, REFUSED, tools="add"),
    case("a tool", CHAT, REFUSED, tools=[{"type": "function"}]),
    case(
        "a tool without a schema",
        CHAT,
        EITHER,
        tools=[{"type": "function", "function": {"name": "x", "parameters": 5}}],
    ),
    # numbers
    *(case(f"n={n}", CHAT, REFUSED, n=n) for n in (0, -1, 10**9, 1.5, "x")),
    *(case(f"n={n}", TEXT, REFUSED, n=n) for n in (0, 10**9)),
    *(case(f"max_tokens={n}", CHAT, REFUSED, max_tokens=n) for n in (-1, 0, 1.5, "x")),
    *(case(f"max_tokens={n}", MESSAGES, REFUSED, max_tokens=n) for n in (-1, 0, "x")),
    case("max_output_tokens=-1", RESPONSES, REFUSED, max_output_tokens=-1),
    case("all tokens", CHAT, EITHER, max_tokens=10**12),
    case("log-probs", CHAT, REFUSED, logprobs=True, top_logprobs=10**6),
    case("log-probs", TEXT, REFUSED, logprobs=10**6),
    *(
        case(f"ids {ids[:1]}", TEXT, REFUSED, prompt=ids)
        for ids in ([10**9], [-1], [512], [2**40], [5] * 5000)
    ),
    case("no ids", TEXT, REFUSED, prompt=[]),
    case("ids and texts", TEXT, REFUSED, prompt=[5, "x"]),
    case("many prompts", TEXT, REFUSED, prompt=["x"] * 10_000),
    # what would change the distribution, or reach beyond the session
    case("embeddings", TEXT, REFUSED, prompt=None, prompt_embeds="gASVAAAAAA=="),
    case(
        "a prompt's ids", CHAT, EITHER, kv_transfer_params={"prompt_token_ids": [1, 2, 3]}
    ),
    case("the prompt again", TEXT, EITHER, echo=True),
    case("another's name", CHAT, EITHER, request_id="x" * 1000),
    case(
        "sampling",
        CHAT,
        EITHER,
        temperature=0.01,
        top_p=0.01,
        top_k=1,
        seed=1,
        logit_bias={"2": 100},
    ),
    case(
        "penalties",
        CHAT,
        EITHER,
        presence_penalty=2,
        frequency_penalty=2,
        repetition_penalty=1.9,
        min_p=0.9,
    ),
    case(
        "allowed ids",
        CHAT,
        EITHER,
        allowed_token_ids=[60],
        bad_words=["a"],
        min_tokens=8,
        ignore_eos=True,
    ),
    case(
        "the last message goes on",
        CHAT,
        EITHER,
        add_generation_prompt=False,
        continue_final_message=True,
    ),
    case("a search", RESPONSES, REFUSED, tools=[{"type": "web_search_preview"}]),
    case(
        "a server",
        RESPONSES,
        REFUSED,
        tools=[{"type": "mcp", "server_label": "x", "server_url": "http://127.0.0.1:1"}],
    ),
    case("an earlier response", RESPONSES, {400, 404}, previous_response_id="resp_x"),
    case("in the background", RESPONSES, REFUSED, background=True, store=True),
    case("any tool", CHAT, ANSWERED, tool_choice="required"),
    case("a number of stops", CHAT, EITHER, stop=["x"] * 10_000),
]
POSTED = (
    "/sleep",
    "/wake_up",
    "/collective_rpc",
    "/reset_prefix_cache",
    "/start_profile",
    "/v1/load_lora_adapter",
    "/tokenize",
    "/detokenize",
    "/invocations",
    "/pooling",
    "/inference/v1/generate",
    "/v1/embeddings",
    "/v1/chat/completions/render",
    "/score",
    "/v1/chat/completions/",
    "/v1//chat/completions",
    "/v1/responses/x/cancel",
    "/pause",
    "/v1/../sleep",
    "/v1/%2e%2e/sleep",
    "/../OTHER/v1/chat/completions",
    "/v1/models",
)
READ = (
    "/health",
    "/metrics",
    "/docs",
    "/openapi.json",
    "/version",
    "/server_info",
    "/load",
    "/v1/chat/completions",
    "/v1/responses/x",
    "/v1",
    "/reward",
    "/v1/models/x",
    "/ping",
)
ABSENT = [  # routes that vLLM serves, and paths that could lead out of a session
    *(("POST", path) for path in POSTED),
    *(("GET", path) for path in READ),
    *((method, CHAT) for method in ("PUT", "DELETE", "OPTIONS", "PATCH")),
]
