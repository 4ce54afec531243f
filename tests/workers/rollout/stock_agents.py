"""Agents that people have: loops over stock clients of the openai and anthropic packages, and a script of
curl.

Each takes the same tasks with `add`, goes on with what the policy said as its client does, and returns its
reward with the turns that it expects the session to hold: `roots` and `continued`.
"""

import asyncio
import json
import os
import socket
import subprocess
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

import openai
from openai.lib.streaming.chat import ChatCompletionStreamState

MODEL = "any name"
PARAMETERS = {
    "type": "object",
    "properties": {name: {"type": "integer"} for name in ("a", "b")},
    "required": ["a", "b"],
}
FUNCTION = {"name": "add", "description": "Adds.", "parameters": PARAMETERS}
TOOLS: Any = [{"type": "function", "function": FUNCTION}]
SURE: Any = {"role": "user", "content": "Sure? é"}
Agent = Callable[["Chats"], Awaitable[float]]


def question(number: int) -> Any:
    return {"role": "user", "content": f"What is {number} plus {number % 7}?"}


def added(arguments: Any) -> str:
    """What the tool answers, whatever the policy wrote."""
    try:
        given = json.loads(arguments) if isinstance(arguments, str) else arguments
        return str(int(given["a"]) + int(given["b"]))
    except (ValueError, TypeError, KeyError) as error:
        return f"error: {type(error).__name__}"


def answered(message: Any) -> list[Any]:
    """The messages after an answer: the tools' results, or a question."""
    calls = message.tool_calls or []
    return [
        {"role": "tool", "tool_call_id": c.id, "content": added(c.function.arguments)}
        for c in calls
    ] or [SURE]


class Chats:
    """Clients of one session, and the turns that it should hold."""

    def __init__(
        self, record: dict[str, Any], base_url: str, key: str, **options: Any
    ) -> None:
        import anthropic  # for 1.3 CPU s, in the processes that use it

        self.record, self.base_url, self.key = record, base_url, key
        self.openai = openai.AsyncOpenAI(
            **({"base_url": base_url, "api_key": key, "max_retries": 0} | options)
        )
        address = base_url.removesuffix("/v1")
        self.anthropic = anthropic.AsyncAnthropic(
            base_url=address, api_key=key, max_retries=0
        )
        self.question = question(record["number"])
        self.roots = self.continued = 0

    def expect(self, continued: Any, count: int = 1) -> None:
        if continued:
            self.continued += count
        else:
            self.roots += count

    async def ask(
        self, messages: list[Any], *, stream: bool = False, **options: Any
    ) -> Any:
        """One turn of a chat, as a message."""
        given = {"model": MODEL, "messages": messages, "tools": TOOLS} | options
        if not stream:
            return (await self.openai.chat.completions.create(**given)).choices[0].message
        # The client's own `stream` raises for an answer that is cut.
        state = ChatCompletionStreamState()
        async for chunk in await self.openai.chat.completions.create(stream=True, **given):
            state.handle_chunk(chunk)
        return state.current_completion_snapshot.choices[0].message

    async def loop(
        self, turns: int, written: Callable[[Any], Any], *, stream: bool = False
    ) -> None:
        """Ask, call the tool, and ask again. written: the answer as the next request holds it."""
        messages = [self.question]
        for turn in range(turns):
            self.expect(turn)
            message = await self.ask(messages, stream=stream)
            messages += [written(message), *answered(message)]


def dumped(message: Any) -> Any:
    return message.model_dump(exclude_none=True)


def written_anew(message: Any) -> Any:
    """With arguments written by another JSON library, without reasoning, and a stripped content."""
    calls = []
    for call in message.tool_calls or []:
        arguments = call.function.arguments
        with suppress(ValueError):
            arguments = json.dumps(json.loads(arguments), sort_keys=True)
        function = {"name": call.function.name, "arguments": arguments}
        calls.append({"id": call.id, "type": "function", "function": function})
    content = (message.content or "").strip()
    return {"role": "assistant", "content": content or None} | (
        {"tool_calls": calls} if calls else {}
    )


async def plain(chats: Chats) -> float:
    await chats.loop(4, dumped)
    return 1.0


async def objects(chats: Chats) -> float:
    await chats.loop(3, lambda message: message)
    return 1.0


async def rewriting_json(chats: Chats) -> float:
    await chats.loop(4, written_anew)
    return 1.0


async def streaming(chats: Chats) -> float:
    await chats.loop(4, dumped, stream=True)
    return 0.5


async def cut_streams(chats: Chats) -> float:
    """Answers that end anywhere in a call, in text or in a thought, and go on."""
    for limit in range(2, 14):
        asked = {"role": "user", "content": f"In {limit} tokens?"}
        message = await chats.ask([asked], stream=True, max_tokens=limit)
        await chats.ask(
            [asked, dumped(message), *answered(message)], stream=True, max_tokens=limit
        )
        chats.expect(False), chats.expect(True)
    return 1.0


async def parallel(chats: Chats) -> float:
    """Four samples of one question, two requests after each, and a summary of all in place of the history."""
    first = await asyncio.gather(
        *(chats.ask([chats.question], temperature=0.1) for _ in range(4))
    )
    chats.expect(False, 4)
    after = [
        [chats.question, dumped(message), *answered(message)]
        for message in first
        for _ in range(2)
    ]
    await asyncio.gather(*(chats.ask(messages) for messages in after))
    chats.expect(True, 8)
    await chats.ask([{"role": "user", "content": "So far: we added."}])
    chats.expect(False)
    return 1.0


async def choices(chats: Chats) -> float:
    """n=3, of which each is continued; a reward for one of them."""
    given = await chats.openai.chat.completions.create(
        model=MODEL, messages=[chats.question], n=3, tools=TOOLS
    )
    chats.expect(False, 3)
    for choice in given.choices:
        await chats.ask([chats.question, dumped(choice.message), *answered(choice.message)])
        chats.expect(True)
    return 1.0


async def rewritten(chats: Chats) -> float:
    """A history with another answer, another question, and one that was taken out."""
    message = await chats.ask([chats.question])
    history = [chats.question, dumped(message), *answered(message)]
    second = await chats.ask(history)
    chats.expect(False), chats.expect(True)
    other = [
        *history[:1],
        {"role": "assistant", "content": f"I said: {message.content}"},
        SURE,
    ]
    await chats.ask(other)
    await chats.ask([question(99), *history[1:], dumped(second), SURE])
    await chats.ask([question(96), dumped(second), SURE])
    chats.expect(False, 3)
    return 0.25


async def retrying(chats: Chats) -> float:
    """A client that gives up after a moment, and asks again until it has the answer; then it goes on."""
    hasty = Chats(chats.record, chats.base_url, chats.key, timeout=0.03, max_retries=20)
    messages = [chats.question]
    for turn in range(3):
        message = await hasty.ask(messages)
        chats.expect(turn)
        messages += [dumped(message), *answered(message)]
    return 1.0


async def keyed(chats: Chats) -> float:
    """Equal requests under one idempotency key are one."""
    key = {"Idempotency-Key": f"k{chats.record['number']}"}
    both = await asyncio.gather(
        *(chats.ask([chats.question], extra_headers=key) for _ in range(2))
    )
    again = await chats.ask([chats.question], extra_headers=key)
    chats.expect(False)
    assert dumped(both[0]) == dumped(both[1]) == dumped(again)
    return 1.0


async def leaving(chats: Chats) -> float:
    """Clients that close the connection: after the request, and in the middle of a stream. Nothing follows
    these.
    """
    messages = [chats.question]
    await asyncio.to_thread(
        left, chats, {"model": MODEL, "messages": messages, "tools": TOOLS}
    )
    stream = await chats.openai.chat.completions.create(
        model=MODEL, messages=[question(98)], stream=True
    )
    async for _ in stream:
        break
    await stream.close()
    message = await chats.ask([question(97)])
    await chats.ask([question(97), dumped(message), *answered(message)])
    chats.expect(False), chats.expect(True)
    return 1.0


def left(chats: Chats, body: dict[str, Any]) -> None:
    """Send a request and close the connection without reading."""
    address = urlsplit(chats.base_url)
    written = json.dumps(body).encode()
    head = f"POST {address.path}/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {chats.key}\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(written)}\r\n\r\n"
    with socket.create_connection((address.hostname, address.port)) as connection:
        connection.sendall(head.encode() + written)


async def messages_api(chats: Chats, *, stream: bool = False) -> float:
    tools: Any = [{"name": "add", "description": "Adds.", "input_schema": PARAMETERS}]
    messages: list[Any] = [chats.question]
    given: Any = {"model": MODEL, "max_tokens": 400, "tools": tools, "system": "You add."}
    for turn in range(3):
        chats.expect(turn)
        if stream:
            async with chats.anthropic.messages.stream(
                messages=messages, **given
            ) as events:
                answer = await events.get_final_message()
        else:
            answer = await chats.anthropic.messages.create(messages=messages, **given)
        blocks = [block.model_dump(exclude_none=True) for block in answer.content]
        messages.append({"role": "assistant", "content": blocks})
        uses = [block for block in answer.content if block.type == "tool_use"]
        results = [
            {"type": "tool_result", "tool_use_id": use.id, "content": added(use.input)}
            for use in uses
        ]
        messages.append({"role": "user", "content": results or SURE["content"]})
    return 1.0


async def messages_streaming(chats: Chats) -> float:
    return await messages_api(chats, stream=True)


async def responses_api(chats: Chats, *, stream: bool = False) -> float:
    tools: Any = [{"type": "function"} | FUNCTION]
    items: list[Any] = [chats.question]
    for turn in range(3):
        chats.expect(turn)
        given: Any = {"model": MODEL, "input": items, "tools": tools, "store": False}
        if stream:
            async with chats.openai.responses.stream(**given) as events:
                async for _ in events:
                    pass
                answer = await events.get_final_response()
        else:
            answer = await chats.openai.responses.create(**given)
        items += [item.model_dump(exclude_none=True) for item in answer.output]
        calls = [item for item in answer.output if item.type == "function_call"]
        results = [
            {
                "type": "function_call_output",
                "call_id": c.call_id,
                "output": added(c.arguments),
            }
            for c in calls
        ]
        items += results or [SURE]
    return 1.0


async def responses_streaming(chats: Chats) -> float:
    return await responses_api(chats, stream=True)


async def completions(chats: Chats) -> float:
    """Text that goes on, and ids."""
    text = f"<|im_start|>user\n{chats.record['number']}<|im_end|>\n<|im_start|>assistant\n"
    for turn in range(3):
        answer = await chats.openai.completions.create(
            model=MODEL, prompt=text, max_tokens=30
        )
        text += (
            answer.choices[0].text
            + f"\n<|im_start|>user\n{turn}<|im_end|>\n<|im_start|>assistant\n"
        )
        chats.expect(turn)
    await chats.openai.completions.create(
        model=MODEL, prompt=[1, 50, 60, 70], max_tokens=30
    )
    chats.expect(False)
    return 1.0


CURL = r"""
set -eu
ask() {
  curl -sS --fail "$OPENAI_BASE_URL/chat/completions" -H "Authorization: Bearer $OPENAI_API_KEY" \
    -H "Content-Type: application/json" -d "{\"model\": \"m\", \"messages\": [$1]}"
}
messages="{\"role\": \"user\", \"content\": \"What is $NUMBER plus 2?\"}"
for turn in 1 2 3; do
  said=$(ask "$messages" | sed -E 's/.*"message":\{"role":"assistant","content":("([^"\\]|\\.)*"|null).*/\1/')
  messages="$messages, {\"role\": \"assistant\", \"content\": $said}, {\"role\": \"user\", \"content\": \"Sure?\"}"
done
curl -sS --fail "$BALLAST_SESSION_URL/reward" -H "Authorization: Bearer $OPENAI_API_KEY" -d '{"reward": 0.75}'
"""


async def curl(chats: Chats) -> float:
    """A script, which also says a reward by HTTP."""
    address = {
        "OPENAI_BASE_URL": chats.base_url,
        "BALLAST_SESSION_URL": chats.base_url.removesuffix("/v1"),
    }
    variables = (
        os.environ
        | address
        | {"OPENAI_API_KEY": chats.key, "NUMBER": str(chats.record["number"])}
    )
    done = await asyncio.to_thread(
        subprocess.run, ["bash", "-c", CURL], env=variables, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    chats.expect(False), chats.expect(True, 2)
    return 0.75


AGENTS: dict[str, Any] = {
    each.__name__: each
    for each in (
        *(
            plain,
            objects,
            rewriting_json,
            streaming,
            cut_streams,
            parallel,
            choices,
            rewritten,
            retrying,
            keyed,
            leaving,
        ),
        *(
            messages_api,
            messages_streaming,
            responses_api,
            responses_streaming,
            completions,
            curl,
        ),
    )
}


async def run(record: dict[str, Any], base_url: str, api_key: str) -> dict[str, float]:
    """Return the reward, with the turns that the session should hold if the agent knows."""
    chats = Chats(record, base_url, api_key)
    async with chats.openai, chats.anthropic:
        reward = await AGENTS[record["client"]](chats)
    known = (
        {"roots": float(chats.roots), "continued": float(chats.continued)}
        if chats.roots
        else {}
    )
    return {"reward": reward} | known
