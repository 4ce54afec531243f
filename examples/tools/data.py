"""Sums and differences that are hard to guess, as chat messages.

user 73+95    > <think>...</think> add(a=73, b=95)    tool 168    > <think>...</think> 168    called
user 73+95    > <think>...</think> 171                                                        guessed
"""

import json
import random
from pathlib import Path
from typing import Any
from zlib import crc32

from examples.addition.data import HELD_OUT_SHARE

SMALLEST, LARGEST = 10, 99
NAMES = {"+": "add", "-": "subtract"}

Messages = list[dict[str, Any]]


def problem(rng: random.Random, *, held_out: bool) -> tuple[int, str, int]:
    """Two numbers of two digits and what to do with them, from the held-out problems or from the others."""
    while True:
        a, b = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
        if (crc32(f"{a} {b}".encode()) % HELD_OUT_SHARE == 0) == held_out:
            return a, rng.choice(list(NAMES)), b


def question(a: int, sign: str, b: int) -> Messages:
    return [{"role": "user", "content": f"{a}{sign}{b}"}]


def result(a: int, sign: str, b: int) -> int:
    return a + b if sign == "+" else a - b


def thought(thinking: str, content: Any = "", **more: Any) -> dict[str, Any]:
    return {
        "role": "assistant",
        "reasoning_content": thinking,
        "content": str(content),
        **more,
    }


def called(a: int, sign: str, b: int) -> Messages:
    """The turns in which the policy calls the tool."""
    return call(NAMES[sign], {"a": a, "b": b}, result(a, sign, b))


def call(name: str, arguments: dict[str, Any], answer: Any) -> Messages:
    """The turns of a call whose result is the answer."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        thought("I call the tool.", tool_calls=[call]),
        {"role": "tool", "content": str(answer)},
        thought("The tool knows.", answer),
    ]


def guessed(rng: random.Random, sign: str) -> Messages:
    a, b = rng.randint(SMALLEST, LARGEST), rng.randint(SMALLEST, LARGEST)
    return [thought("I can guess.", result(a, sign, b))]


def write(path: Path, count: int, *, seed: int, held_out: bool) -> None:
    """`count` problems as JSONL records with `prompt` and `answer`."""
    rng = random.Random(seed)
    problems = [problem(rng, held_out=held_out) for _ in range(count)]
    records = (
        {"prompt": question(*each), "answer": str(result(*each))} for each in problems
    )
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
