"""Rows of samples as tables: columns and data, or Markdown."""

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from controller.observability.recorded_values import finite


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(name for row in rows for name in row))


def tabular(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Return `columns` and `data`, a list of numbers or texts a row: lists and mappings become JSON, NaN
    None.
    """
    names = _columns(rows)
    data = []
    for row in rows:
        data.append([_cell(row.get(name)) for name in names])
    return {"columns": names, "data": data}


def _cell(value: Any) -> Any:
    if isinstance(value, float):
        return finite(value)
    return (
        json.dumps(value, ensure_ascii=False) if isinstance(value, (list, dict)) else value
    )


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """Write rows as a Markdown table, with HTML escaped."""
    names = _columns(rows)
    lines = [names, ["---"] * len(names)]
    for row in rows:
        lines.append([_escape(row.get(name, "")) for name in names])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _escape(value: Any) -> str:
    text = f"{value:.4g}" if isinstance(value, float) else str(_cell(value))
    return escape(text).replace("\\", "\\\\").replace("|", "\\|").replace("\n", "<br>")
