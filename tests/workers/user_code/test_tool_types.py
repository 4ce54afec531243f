"""Tools whose calls would fail are refused before a run."""

from pathlib import Path

import pytest

from tests.refusals import refused
from workers.user_code.functions import find_tools

TOOL = '''
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


@pytest.mark.drawn(2)
@pytest.mark.parametrize(
    ("hint", "body", "told"),
    [
        (
            "bytes",
            "return ''",
            "search cannot be called: its argument value has the type bytes",
        ),
        (
            "Page",
            "return ''",
            "search cannot be called: its argument value has the type Page",
        ),
        ("list[Page]", "return ''", "the type Page"),
        ("Optional[bytes]", "return ''", "the type bytes"),
        ("dict[str, list[bytes]]", "return ''", "the type bytes"),
        ("str", "yield ''", "search cannot be called: it is a generator"),
    ],
)
def test_tools_that_cannot_be_called_are_refused(
    tmp_path: Path, hint: str, body: str, told: str
) -> None:
    (tmp_path / "tools.py").write_text(TOOL.format(hint=hint, body=body))
    with refused(told):
        find_tools("rollout.tools", str(tmp_path / "tools.py"), timeout_s=60)


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
    (tmp_path / "tools.py").write_text(TOOL.format(hint=hint, body="return ''"))
    assert find_tools("rollout.tools", str(tmp_path / "tools.py"), timeout_s=60).schemas
