"""Users' tools in real processes: whatever they do, the policy reads what happened, and the
episode goes on.
"""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.refusals import refused
from workers.environment import Observation, Turn
from workers.user_code.functions import Tools, find_tools
from workers.user_code.tools import ToolPool

TOOLS = '''
import asyncio, datetime, decimal, os, subprocess, time
from math import sqrt

def divide(a: float, b: float) -> float:
    """Divide two numbers.

    Args:
        a: The dividend.
        b: The divisor.
    """
    return a / b

async def wait(seconds: float, word: str = "done") -> dict:
    """Wait.

    Args:
        seconds: How long.
        word: The answer.
    """
    await asyncio.sleep(seconds)
    return {"word": word, "pid": os.getpid()}

def do(what: str) -> str:
    """Misbehave.

    Args:
        what: What to do.
    """
    if what == "exit":
        os._exit(7)
    if what == "leave":
        raise SystemExit(3)
    if what == "fork" and os.fork() == 0:
        time.sleep(99)
    if what == "children":
        subprocess.Popen(["sleep", "99"])
    return "x" * 50_000_000 if what == "megabytes" else what

def show(kind: str):
    """Return a value.

    Args:
        kind: What it is.
    """
    values = {
        "generator": lambda: (letter for letter in "ab"),
        "coroutines": lambda: [wait(0.0)],
        "object": object,
        "function": lambda: show,
        "date": lambda: datetime.date(2026, 11, 28),
        "decimals": lambda: {"price": decimal.Decimal("1.5")},
    }
    return values[kind]()

def _hidden(): ...
'''


def call(name: str, number: int = 1, **arguments: Any) -> dict[str, Any]:
    return {
        "id": f"call{number}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Tools:
    """The functions of TOOLS, described once: a process imports 2 CPU seconds of transformers for schemas."""
    file = tmp_path_factory.mktemp("tools") / "tools.py"
    file.write_text(TOOLS)
    return find_tools("rollout.tools", str(file), timeout_s=60.0)


def answers(
    tools: Tools, *turns: Turn, offered: list[str] | None = None, **limits: Any
) -> list[Observation]:
    async def play() -> list[Observation]:
        pool = ToolPool(
            tools.packed,
            **{"timeout_s": 1.5, "max_calls": 3, "max_characters": 40} | limits,
        )
        try:
            schemas = [
                s
                for s in tools.schemas
                if offered is None or s["function"]["name"] in offered
            ]
            async with pool.episode(schemas) as environment:
                assert await environment.reset({}) == ""
                return [await environment.step(turn) for turn in turns]
        finally:
            await pool.stop()

    return asyncio.run(play())


def test_schemas_are_those_of_public_functions(tools: Tools, tmp_path: Path) -> None:
    assert [schema["function"]["name"] for schema in tools.schemas] == [
        "divide",
        "wait",
        "do",
        "show",
    ]
    assert tools.schemas[0]["function"]["parameters"]["required"] == ["a", "b"]
    (tmp_path / "tools.py").write_text(
        f"{TOOLS}\nfrom os.path import basename\n__all__ = ['divide']\n"
    )
    schemas = find_tools(
        "rollout.tools", str(tmp_path / "tools.py"), timeout_s=60.0
    ).schemas
    assert [schema["function"]["name"] for schema in schemas] == ["divide"]


def test_whatever_a_call_does_the_policy_reads_what_happened(tools: Tools) -> None:
    bad = call("divide") | {"function": {"name": "divide", "arguments": "1, 2"}}
    turns = [
        ([call("divide", a=1, b=4)], "0.25"),
        ([call("divide", a=1, b=0)], "Error: ZeroDivisionError: division by zero"),
        (
            [call("divide", a=1)],
            "Error: TypeError: divide() missing 1 required positional argument: 'b'",
        ),
        (
            [call("divided", a=1)],
            "Error: there is no tool divided. Use one of: divide, do, show, wait",
        ),
        ([bad], "Error: the arguments are not a JSON object"),
        ([call("wait", seconds=99)], "Error: wait took more than reward.timeout_s=1.5 s"),
        ([call("do", what="exit")], "Error: do ended its process"),
        ([call("do", what="leave")], "Error: SystemExit: 3"),
        ([call("do", what="fork")], "fork"),
        ([call("do", what="children")], "children"),
        ([call("do", what="megabytes")], f"{'x' * 40} [cut: 49,999,960 more characters]"),
    ]
    found = answers(tools, *[Turn("", tool_calls=calls) for calls, _ in turns], Turn("4"))
    assert [observation.text for observation in found[:-1]] == [
        [
            {
                "role": "tool",
                "tool_call_id": "call1",
                "name": calls[0]["function"]["name"],
                "content": words,
            }
        ]
        for calls, words in turns
    ]
    assert [observation.done for observation in found] == [False] * len(turns) + [True]
    parts = found[-1].parts
    assert (parts["tools/calls"], parts["tools/failed"], found[-1].reward) == (
        len(turns),
        7,
        0.0,
    )
    assert parts["tools/seconds"] > 1.5


@pytest.mark.drawn(1)
@pytest.mark.parametrize("kind", ["generator", "coroutines", "object", "function"])
def test_an_answer_whose_text_is_a_place_in_memory_is_an_error(
    tools: Tools, kind: str
) -> None:
    (answer, _) = answers(tools, Turn("", tool_calls=[call("show", kind=kind)]), Turn("4"))
    assert answer.text[0]["content"].startswith(
        "Error: TypeError: the tool returned a value of type "
    )


@pytest.mark.parametrize(
    ("kind", "text"), [("date", '"2026-11-28"'), ("decimals", '{"price": "1.5"}')]
)
def test_an_answer_with_a_text_of_its_own_is_read(
    tools: Tools, kind: str, text: str
) -> None:
    (answer, _) = answers(tools, Turn("", tool_calls=[call("show", kind=kind)]), Turn("4"))
    assert answer.text[0]["content"] == text


def test_calls_of_a_turn_are_made_side_by_side_up_to_a_limit(tools: Tools) -> None:
    several = Turn(
        "", tool_calls=[call("wait", n, seconds=0.7, word=str(n)) for n in range(4)]
    )
    broken = Turn("", tool_calls=[call("do", what="a")], errors=["no JSON"])
    (found, after, alone) = answers(tools, several, broken, Turn("", errors=["no JSON"]))
    assert found.parts["tools/seconds"] < 3 * 0.7 + 1
    words = [message["content"] for message in found.text]
    assert [f'"word": "{n}"' in text for n, text in enumerate(words[:3])] == [True] * 3
    assert len({text.partition("pid")[2] for text in words[:3]}) == 3  # a process each
    assert words[3] == "Error: at most 3 calls of a turn are made"
    assert after.text[0]["content"] == "a\nError: no JSON. Write the call again."
    assert alone.text == [
        {"role": "user", "content": "Error: no JSON. Write the call again."}
    ]
    assert (alone.parts["tools/calls"], alone.parts["tools/failed"]) == (7, 3)


def test_a_record_says_which_tools_it_offers(tools: Tools) -> None:
    turn = Turn("", tool_calls=[call("do", what="a"), call("divide", a=1, b=2)])
    (found,) = answers(tools, turn, offered=["divide"])
    assert [m["content"] for m in found.text] == [
        "Error: there is no tool do. Use one of: divide",
        "0.5",
    ]


SEARCH = '''
from typing import Any, Literal, Optional, TypedDict

class Page:
    pass

class Place(TypedDict):
    city: str

def search(value: {hint}) -> str:
    """Search.

    Args:
        value: What for.
    """
    {body}
'''


def search(hint: str, body: str = "return ''") -> str:
    return SEARCH.format(hint=hint, body=body)


@pytest.mark.drawn(9)
@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("def f(a):\n    'Doc.'", ""),
        ("def f(a: int): ...", ""),
        ("def f(a: int):\n    'Doc.'", ""),
        ("import os\nx = 1", ""),
        ("raise ValueError('no')", ""),
        ("import threading\nL = threading.Lock()\ndef f():\n    'Doc.'\n    return L", ""),
        ("import time\ntime.sleep(99)", ""),
        (search("bytes"), "search cannot be called: its argument value has the type bytes"),
        (search("Page"), "search cannot be called: its argument value has the type Page"),
        (search("list[Page]"), "the type Page"),
        (search("Optional[bytes]"), "the type bytes"),
        (search("dict[str, list[bytes]]"), "the type bytes"),
        (search("str", "yield ''"), "search cannot be called: it is a generator"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(
    tmp_path: Path, source: str, reason: str
) -> None:
    (tmp_path / "tools.py").write_text(source)
    limit_s = 2.0 if "sleep" in source else 60.0
    with refused(reason or "rollout.tools"):
        find_tools("rollout.tools", str(tmp_path / "tools.py"), timeout_s=limit_s)


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    "hint",
    [
        "str",
        "int | None",
        "list[str]",
        "dict[str, Any]",
        "Literal['a', 'b']",
        "list[dict[str, float]]",
        "dict",
        "tuple[int, int]",
        "Any",
    ],
)
def test_tools_of_json_types_are_taken(tmp_path: Path, hint: str) -> None:
    (tmp_path / "tools.py").write_text(search(hint))
    assert find_tools("rollout.tools", str(tmp_path / "tools.py"), timeout_s=60).schemas
