"""Policies without a model: what they answer follows from the record and from what the environment said."""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workers.environment import Turn
from workers.user_code.task_sources import TASK

WORDS = [
    "stone",
    "17",
    "river",
    "yes",
    "3",
    "move",
    "north",
    "x",
    "because",
    "42",
    "open",
    "no",
    "left",
]
CALL = '<tool_call>\n{"name": "no_such_tool", "arguments": {"x": \n</tool_call>'
ODD = "\x00\x1b[31m\u202e\ufffd\u200b \U0001f642 \u00e9{{7*7}}%s\\"
LONGEST = 20_000
RANDOM = "random words"
ORACLE_FORMS = {
    "the answer alone": "{}",
    "boxed": "\\boxed{{{}}}",
    "in <answer> tags": "<answer>{}</answer>",
    "after ####": "#### {}",
    "in a sentence": "The answer is {}.",
}

Answer = Callable[["Position"], Turn]
"""What a policy writes at a position."""


@dataclass(frozen=True)
class Position:
    """What a policy reads at its turn. text: the prompt, later the last observation. turn: from 0."""

    text: str
    turn: int


@dataclass(frozen=True)
class Policy:
    """may_know: whether its turns may hold the record's answer by design."""

    name: str
    answer: Answer
    may_know: bool = False


def panel(max_new_tokens: int) -> list[Policy]:
    """Policies that know no answer. max_new_tokens: of a turn."""
    length = min(LONGEST, 4 * max_new_tokens)
    return [
        Policy("empty", lambda position: turn_of("")),
        Policy(RANDOM, _random_words),
        Policy(
            "repeat what was shown", lambda position: turn_of(position.text), may_know=True
        ),
        Policy("a call that cannot be read", lambda position: _broken_call()),
        Policy("a call of an unknown tool", lambda position: _unknown_call(position.turn)),
        Policy("odd characters", lambda position: turn_of(ODD)),
        Policy(
            "one word to the cap", lambda position: turn_of(("again " * length)[:length])
        ),
    ]


def oracles(record: Mapping[str, Any], answer_key: str) -> list[Policy]:
    """Return a policy for every form of the record's answer, none without an answer."""
    answer = answer_of(record, answer_key)
    policies = []
    for name, form in ORACLE_FORMS.items() if answer else ():
        policies.append(
            Policy(f"oracle, {name}", constant(form.format(answer)), may_know=True)
        )
    return policies


def answer_of(record: Mapping[str, Any], answer_key: str) -> str:
    """Return a record's answer as a text, empty without one that is a text or a number.

    A task of verifiers holds its answer itself.
    """
    task = record.get(TASK)
    columns = {**task, **record} if isinstance(task, dict) else record
    answer = columns.get(answer_key)
    return str(answer).strip() if isinstance(answer, (str, int, float)) else ""


def constant(text: str) -> Answer:
    return lambda position: turn_of(text)


def turn_of(text: str) -> Turn:
    return Turn(text, text=text, content=text)


def _random_words(position: Position) -> Turn:
    rng = random.Random(position.turn)
    return turn_of(" ".join(rng.choices(WORDS, k=8)))


def _broken_call() -> Turn:
    return Turn(
        CALL, text=CALL, content="", errors=["the arguments of no_such_tool are not JSON"]
    )


def _unknown_call(turn: int) -> Turn:
    return Turn("", text=CALL, content="", tool_calls=[tool_call("no_such_tool", {}, turn)])


def tool_call(name: str, arguments: Any, number: int = 0) -> dict[str, Any]:
    function = {"name": name, "arguments": arguments}
    return {"id": f"call_{number}", "type": "function", "function": function}
