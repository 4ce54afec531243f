"""A policy without a model behind an HTTP address, for agents: OpenAI's chat completions, no other route.

agent --POST /v1/chat/completions--> Script: the policy's next turn --> a whole answer, or a stream
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Lock, Thread
from typing import Any

from ballast.certify.environment.policies import Policy, Position
from workers.environment import as_text

ROUTE = "/chat/completions"
ENDED = 400


@dataclass
class Script:
    """A session's policy, and what the agent showed it. other_routes: that the agent called."""

    policy: Policy
    max_turns: int
    texts: list[str] = field(default_factory=list)
    other_routes: list[str] = field(default_factory=list)
    too_many: int = 0
    lock: Lock = field(default_factory=Lock)

    def answer(self, messages: list[dict[str, Any]]) -> dict[str, Any] | None:
        """Return the assistant's message, or None after the last turn."""
        with self.lock:
            if len(self.texts) >= self.max_turns:
                self.too_many += 1
                return None
            position = Position(as_text(messages[-1:]), len(self.texts))
            self.texts.append(as_text(messages if not self.texts else messages[-1:]))
        turn = self.policy.answer(position)
        message: dict[str, Any] = {
            "role": "assistant",
            "content": turn.content or turn.text,
        }
        if turn.tool_calls:
            message["tool_calls"] = [_as_text_arguments(call) for call in turn.tool_calls]
        return message


def _as_text_arguments(call: dict[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return call | {"function": function | {"arguments": json.dumps(function["arguments"])}}


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, script: Script) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.script = script


class _Handler(BaseHTTPRequestHandler):
    server: _Server

    def log_message(self, format: str, *arguments: Any) -> None:
        """Print nothing."""

    def do_GET(self) -> None:
        self._send(200, {"object": "list", "data": [{"id": "policy", "object": "model"}]})

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers.get("Content-Length", 0))))
        if not self.path.endswith(ROUTE):
            self.server.script.other_routes.append(self.path)
            self._send(
                404,
                {
                    "error": {
                        "message": f"{self.path}: not served",
                        "type": "invalid_request_error",
                    }
                },
            )
            return
        message = self.server.script.answer(request["messages"])
        if message is None:
            self._send(
                ENDED,
                {
                    "error": {
                        "message": "the episode is over",
                        "type": "invalid_request_error",
                    }
                },
            )
        elif request.get("stream"):
            self._stream(message)
        else:
            self._send(200, completion("chat.completion", {"message": message}))

    def _send(self, code: int, body: dict[str, Any]) -> None:
        data = json.dumps(body).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _stream(self, message: dict[str, Any]) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.end_headers()
        calls = [
            {"index": number, **call}
            for number, call in enumerate(message.get("tool_calls", ()))
        ]
        delta = message | ({"tool_calls": calls} if calls else {})
        chunk = completion("chat.completion.chunk", {"delta": delta})
        self.wfile.write(f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n".encode())


def completion(kind: str, choice: dict[str, Any]) -> dict[str, Any]:
    """A whole answer of the API with one choice."""
    message = choice.get("message") or choice["delta"]
    reason = "tool_calls" if message.get("tool_calls") else "stop"
    return {
        "id": "chatcmpl-certify",
        "object": kind,
        "created": 0,
        "model": "policy",
        "choices": [{"index": 0, "finish_reason": reason, "logprobs": None, **choice}],
        "usage": {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2},
    }


@contextmanager
def serving(script: Script) -> Iterator[str]:
    """Serve a script, and yield its base URL without the version."""
    server = _Server(script)
    thread = Thread(target=server.serve_forever, args=(0.02,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
