"""Find what a tool cannot be called with: arguments come as JSON, and its answer must be a value.

search(query: str, page: bytes) --problem_of_tool--> "its argument page has the type bytes, which no JSON has"
"""

import types
from collections.abc import Callable, Mapping, Sequence
from inspect import isasyncgenfunction, isgeneratorfunction, signature
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

JSON_TYPES = (str, int, float, bool, type(None), dict, list, tuple, Any, Mapping, Sequence)


def problem_of_tool(tool: Callable[..., Any]) -> str:
    """Return why calls of a tool would fail, or ""."""
    if isgeneratorfunction(tool) or isasyncgenfunction(tool):
        return "it is a generator. Return a text instead"
    hints = get_type_hints(tool)
    for name in signature(tool).parameters:
        wrong = _not_in_json(hints[name]) if name in hints else None
        if wrong is not None:
            type_name = getattr(wrong, "__name__", str(wrong))
            return f"its argument {name} has the type {type_name}, which no JSON has: take a text or a dict"
    return ""


def _not_in_json(hint: Any) -> Any:
    """Return the first type of a hint that JSON does not have, or None."""
    origin = get_origin(hint)
    if origin is Literal or hint in JSON_TYPES or is_typeddict(hint):
        return None
    if origin in (Union, types.UnionType) or origin in JSON_TYPES:
        wrong = (_not_in_json(part) for part in get_args(hint) if part is not ...)
        return next((part for part in wrong if part is not None), None)
    return hint
