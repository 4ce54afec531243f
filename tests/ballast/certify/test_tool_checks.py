"""Planted defects of tools are named as what they are, and clean tools have none."""

import asyncio
from collections.abc import Callable
from typing import Any

import cloudpickle
import pytest
from transformers.utils import get_json_schema

from ballast.certify.environment.tool_checks import TriedTools, check_tools
from examples.tools import tools as example
from tests.ballast.certify import planted_tools as planted
from workers.user_code.functions import Tools

RUNS_CODE = [planted.runs_code_unconfined, planted.runs_shell]


def findings_of(*functions: Callable[..., Any]) -> list[str]:
    packed = cloudpickle.dumps({function.__name__: function for function in functions})
    tools = Tools(packed, [get_json_schema(function) for function in functions])
    tried = TriedTools(tools, timeout_s=1.0, max_calls=8, max_characters=1000)
    findings, calls = asyncio.run(check_tools(tried, ["alpha", "beta 2", "3+4"]))
    assert calls >= 3
    return [finding.name for finding in findings]


@pytest.mark.parametrize("name", planted.DEFECTS)
def test_a_planted_defect_is_named_alone(name: str) -> None:
    assert findings_of(planted.DEFECTS[name]) == [name]


@pytest.mark.parametrize("tool", RUNS_CODE)
def test_a_tool_that_runs_its_argument_is_named_unless_it_always_fails(
    tool: Callable[..., Any],
) -> None:
    """A shell takes any word. `eval` takes none of the words of a prompt, but does take a program."""
    assert "tools.runs_code_unconfined" in findings_of(tool)


def test_clean_tools_have_no_finding() -> None:
    assert findings_of(*planted.CLEAN, example.add, example.subtract) == []
