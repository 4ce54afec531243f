"""Forms of OpenAI's and Anthropic's APIs: errors that their clients read, and answers as chat messages. Pure.

answer's bytes, JSON or a stream --answers_in--> id, {choice: {role: assistant, content, tool_calls}}
"""

import json
from collections.abc import Iterator
from typing import Any

TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def error_body(path: str, status: int, message: str) -> bytes:
    """Return the JSON of an error in the form of the API that `path` belongs to, Anthropic's for
    `.../messages`.
    """
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    error: dict[str, Any] = {"type": kind, "message": message}
    anthropic = "/v1/messages" in path
    document = (
        {"type": "error", "error": error}
        if anthropic
        else {"error": error | {"param": None, "code": status}}
    )
    return json.dumps(document).encode()


def answers_in(body: bytes) -> tuple[str, dict[int, dict[str, Any]]]:
    """Return the id of an answer, JSON or a stream of events, and its choices as messages of an assistant."""
    name = ""
    messages = dict[int, dict[str, Any]]()
    for document in _documents(body):
        document = document.get("response") or document.get("message") or document
        name = document.get("id") or name
        for index, part in _parts(document):
            _add(messages.setdefault(index, {"role": "assistant", "content": ""}), part)
    for message in messages.values():
        if calls := message.pop("calls", None):
            message["tool_calls"] = list(calls.values())
    return name, messages


def _documents(body: bytes) -> Iterator[dict[str, Any]]:
    if body[:1] == b"{":
        yield json.loads(body)
        return
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            event = json.loads(line[6:])
            if (
                not str(event.get("type", "")).startswith("response.")
                or event["type"] == "response.completed"
            ):
                yield event


def _parts(document: dict[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    """Parts of answers, by choice: `content`, `reasoning`, and `tool_calls` with an index, in
    OpenAI's form.
    """
    for choice in document.get("choices") or ():  # chat and completions
        yield (
            choice["index"],
            choice.get("message") or choice.get("delta") or {"content": choice.get("text")},
        )
    for number, item in enumerate(document.get("output") or ()):  # responses
        if item["type"] == "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            yield (
                0,
                {
                    "tool_calls": [
                        {"index": number, "id": item["call_id"], "function": function}
                    ]
                },
            )
        elif item["type"] == "message":
            yield 0, {"content": "".join(part.get("text", "") for part in item["content"])}
        elif item["type"] == "reasoning":
            yield (
                0,
                {
                    "reasoning": "".join(
                        part.get("text", "") for part in item.get("content") or ()
                    )
                },
            )
    blocks = document.get("content") if document.get("role") == "assistant" else None
    for number, block in enumerate(blocks or ()):  # messages
        yield 0, _block(number, block)
    if document.get("type") == "content_block_start":
        yield 0, _block(document["index"], document["content_block"])
    elif document.get("type") == "content_block_delta":
        delta = document["delta"]
        if "partial_json" in delta:
            arguments = {"arguments": delta["partial_json"]}
            yield 0, {"tool_calls": [{"index": document["index"], "function": arguments}]}
        else:
            yield 0, {"content": delta.get("text"), "reasoning": delta.get("thinking")}


def _block(number: int, block: dict[str, Any]) -> dict[str, Any]:
    if block["type"] != "tool_use":
        return {"content": block.get("text"), "reasoning": block.get("thinking")}
    arguments = json.dumps(block["input"]) if block.get("input") else ""
    function = {"name": block["name"], "arguments": arguments}
    return {"tool_calls": [{"index": number, "id": block["id"], "function": function}]}


def _add(message: dict[str, Any], part: dict[str, Any]) -> None:
    message["content"] += part.get("content") or ""
    if reasoning := part.get("reasoning"):
        message["reasoning_content"] = message.get("reasoning_content", "") + reasoning
    for number, piece in enumerate(part.get("tool_calls") or ()):
        calls = message.setdefault("calls", {})
        empty = {"id": "", "type": "function", "function": {"name": "", "arguments": ""}}
        call = calls.setdefault(piece.get("index", number), empty)
        call["id"] = piece.get("id") or call["id"]
        for field, text in (piece.get("function") or {}).items():
            if field in call["function"]:
                call["function"][field] += text or ""
