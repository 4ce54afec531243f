"""Checks of rollout.tools: calls with good and bad arguments, twice, and after other calls.

    schema --arguments--> good and bad calls --ToolPool--> results --> findings

Ballast answers malformed calls and exceptions itself. Left are tools that end or hold up their process,
that fail on good arguments, that remember, or that run what the policy writes.
"""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ballast.certify.environment.policies import ODD, tool_call
from ballast.certify.environment.sandbox_checks import check_sandbox_tools
from ballast.certify.findings import Finding, Level
from workers.config.sandbox import SandboxConfig
from workers.environment import Turn
from workers.sandbox import tools as sandbox_tools
from workers.user_code.functions import Tools
from workers.user_code.tools import ToolPool

FAILED = "Error: "
BUGS = re.compile(
    r"Error: (NameError|AttributeError|ImportError|ModuleNotFoundError|UnboundLocalError|NotImplementedError"
    r"|RuntimeError|FileNotFoundError|PermissionError|ConnectionError)\b"
)
ENDS = ("ended its process", "took more than")
BAD_VALUES: tuple[Any, ...] = (None, "", -1, 10**30, [], {}, "9" * 5000, ODD)
PLACE = "rollout.tools"


@dataclass(frozen=True)
class TriedTools:
    """tools: functions and their schemas. max_calls, max_characters, sandbox: as in rollout."""

    tools: Tools
    timeout_s: float
    max_calls: int
    max_characters: int
    sandbox: SandboxConfig = field(default_factory=SandboxConfig)

    def new_pool(self) -> ToolPool:
        limits = {"max_calls": self.max_calls, "max_characters": self.max_characters}
        return ToolPool(self.tools.packed, self.timeout_s, **limits)

    @property
    def functions(self) -> list[dict[str, Any]]:
        """Schemas of those that run outside of a sandbox."""
        functions = [schema["function"] for schema in self.tools.schemas]
        return [
            function for function in functions if function["name"] not in self.sandbox_names
        ]

    @property
    def sandbox_names(self) -> set[str]:
        """Names of those that act in the sample's sandbox."""
        if not self.sandbox.kind:
            return set()
        return {schema["function"]["name"] for schema in self.tools.schemas} & set(
            sandbox_tools.__all__
        )


async def check_tools(
    target: TriedTools, texts: Sequence[str]
) -> tuple[list[Finding], int]:
    """Return the findings, and how many calls were made. texts: prompts, whose words are arguments."""
    caller = Caller(target, target.new_pool())
    second = Caller(target, target.new_pool())
    findings = []
    try:
        for function in target.functions:
            findings += await _check_tool(caller, second, function, texts)
    finally:
        await caller.pool.stop()
        await second.pool.stop()
    calls = caller.calls + second.calls
    if target.sandbox_names:
        more, sandbox_calls = await check_sandbox_tools(
            target.sandbox, target.sandbox_names, PLACE
        )
        findings += more
        calls += sandbox_calls
    return findings, calls


class Caller:
    """Calls tools as a policy does."""

    def __init__(self, target: TriedTools, pool: ToolPool) -> None:
        self.pool = pool
        self.calls = 0
        self._schemas = target.tools.schemas

    async def call(self, name: str, arguments: Any) -> str:
        """Return the content of the message that answers a call."""
        self.calls += 1
        async with self.pool.episode(self._schemas) as environment:
            observation = await environment.step(
                Turn("", tool_calls=[tool_call(name, arguments)])
            )
        assert isinstance(observation.text, list)
        return str(observation.text[-1]["content"])


async def _check_tool(
    caller: Caller, second: Caller, function: Mapping[str, Any], texts: Sequence[str]
) -> list[Finding]:
    """Return what is wrong with a tool: the first thing, because others follow from it."""
    name = function["name"]
    good = _good_arguments(function, texts)
    results = [await caller.call(name, arguments) for arguments in good]
    for arguments, result in zip(good, results, strict=True):
        if any(end in result for end in ENDS):
            return [_ended(name, arguments, result)]
    # Before failures, because an interpreter fails on the words of a prompt.
    if finding := await _runs_code(caller, function, good[0]):
        return [finding]
    if finding := _fails(name, good, results):
        return [finding]
    if finding := await _remembers(caller, second, name, good, results):
        return [finding]
    for arguments in _bad_arguments(function, good[0]):
        result = await caller.call(name, arguments)
        if any(end in result for end in ENDS):
            return [_ended(name, arguments, result)]
    return []


def _good_arguments(
    function: Mapping[str, Any], texts: Sequence[str]
) -> list[dict[str, Any]]:
    """Return arguments that the schema allows, three sets of them."""
    properties = function.get("parameters", {}).get("properties", {})
    sets = []
    for number in range(3):
        text = texts[number % len(texts)]
        sets.append(
            {key: _value(schema, number, text) for key, schema in properties.items()}
        )
    return sets


def _value(schema: Mapping[str, Any], number: int, text: str) -> Any:
    if options := schema.get("enum"):
        return options[number % len(options)]
    match schema.get("type"):
        case "integer":
            return 12 + number
        case "number":
            return 2.5 + number
        case "boolean":
            return number % 2 == 0
        case "array":
            return [_value(schema.get("items", {}), number, text)]
        case "object":
            return {
                key: _value(part, number, text)
                for key, part in schema.get("properties", {}).items()
            }
    return text


def _bad_arguments(function: Mapping[str, Any], good: Mapping[str, Any]) -> list[Any]:
    """Return arguments that a policy may write and the schema does not allow."""
    bad: list[Any] = ["{not json", {}, {**good, "no_such_argument": 1}]
    for key in good:
        bad += [{**good, key: value} for value in BAD_VALUES]
    return bad


def _ended(name: str, arguments: Any, result: str) -> Finding:
    hangs = ENDS[1] in result
    return Finding(
        name="tools.hangs" if hangs else "tools.ends_process",
        level=Level.CERTAIN,
        problem=f"the tool {name} {'does not answer in time' if hangs else 'ends its process'}",
        place=f"{PLACE}, {name}",
        advice="give every wait a limit"
        if hangs
        else "raise an exception: the policy reads its text",
        evidence=f"{name}({_short(arguments)}): {result[:200]}",
    )


def _fails(name: str, good: Sequence[Any], results: Sequence[str]) -> Finding | None:
    """Name a tool that fails on arguments that its schema allows."""
    failed = [result for result in results if result.startswith(FAILED)]
    if not failed:
        return None
    bug = next((result for result in failed if BUGS.match(result)), "")
    if not bug and len(failed) < len(results):
        return None
    position = results.index(bug or failed[0])
    return Finding(
        name="tools.broken" if bug else "tools.always_fails",
        level=Level.CERTAIN if bug else Level.LIKELY,
        problem=f"the tool {name} fails on {len(failed)} of {len(results)} calls that its schema allows",
        place=f"{PLACE}, {name}",
        advice="call it by hand with these arguments, or let the schema name what it takes",
        evidence=f"{name}({_short(good[position])}): {results[position][:200]}",
    )


async def _remembers(
    caller: Caller, second: Caller, name: str, good: Sequence[Any], results: Sequence[str]
) -> Finding | None:
    """Name a tool whose result follows from earlier calls, or from chance."""
    again = await caller.call(name, good[0])
    fresh = await second.call(name, good[0])
    if again == results[0] == fresh:
        return None
    by_chance = fresh != results[0]
    return Finding(
        name="tools.not_deterministic" if by_chance else "tools.state_left_behind",
        level=Level.LIKELY if by_chance else Level.CERTAIN,
        problem=f"the tool {name} answers the same call differently "
        f"{'in two processes' if by_chance else 'after other calls'}",
        place=f"{PLACE}, {name}",
        advice="let the result follow from the arguments alone"
        if by_chance
        else "keep nothing between calls: a process serves many samples",
        evidence=f"{name}({_short(good[0])}): {results[0][:80]!r}, then "
        f"{(fresh if by_chance else again)[:80]!r}",
    )


async def _runs_code(
    caller: Caller, function: Mapping[str, Any], good: dict[str, Any]
) -> Finding | None:
    """Name a tool that runs an argument as code or as a shell's command, outside of a sandbox."""
    texts = [key for key, value in good.items() if isinstance(value, str)]
    with tempfile.TemporaryDirectory() as folder:
        for number, form in enumerate(CODE_FORMS):
            marker = Path(folder, str(number))
            code = form.format(path=marker)
            for key in texts:
                await caller.call(function["name"], {**good, key: code})
                if marker.exists():
                    return Finding(
                        name="tools.runs_code_unconfined",
                        level=Level.CERTAIN,
                        problem=f"the tool {function['name']} runs its argument {key} as code, which wrote a "
                        "file on this machine",
                        place=f"{PLACE}, {function['name']}",
                        advice="parse the argument, or run it in a sandbox as examples/code does",
                        evidence=code.replace(str(marker), "FILE"),
                    )
    return None


CODE_FORMS = (
    "__import__('pathlib').Path('{path}').write_text('x')",
    "; touch {path}",
    "$(touch {path})",
)


def _short(arguments: Any) -> str:
    return json.dumps(arguments, ensure_ascii=True)[:120]
