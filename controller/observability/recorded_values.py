"""Values as the JSON lines of a run hold them."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from controller.observability.shown_text import message_text, shorten


def finite(value: float) -> float | None:
    """Return `value`, or None if JSON has no number for it."""
    return value if math.isfinite(value) else None


def as_recorded(nodes: Sequence[Mapping[str, Any]], longest: int) -> list[dict[str, Any]]:
    """Return `Session.describe_turns` for a record: messages as texts, `longest` characters in all."""
    most = max(1, longest // sum(1 + len(node["messages"]) for node in nodes))

    def text_of(message: Mapping[str, Any]) -> str:
        return shorten(message_text(message), most)

    records = []
    for node in nodes:
        record = {
            name: finite(value) if isinstance(value, float) else value
            for name, value in node.items()
        }
        record["messages"] = [
            {"role": message["role"], "content": text_of(message)}
            for message in node["messages"]
        ]
        record["said"] = text_of(node["said"])
        records.append(record)
    return records
