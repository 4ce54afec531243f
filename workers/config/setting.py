"""A setting: a dataclass field with its documentation, default and range."""

from dataclasses import field
from typing import Any


def setting(
    default: Any,
    doc: str,
    *,
    minimum: float | None = None,
    maximum: float | None = None,
    above: float | None = None,
    below: float | None = None,
    choices: tuple[str, ...] | None = None,
) -> Any:
    """A dataclass field with its documentation and range. The bounds `above` and `below` are excluded."""
    metadata = {
        "doc": doc,
        "minimum": minimum if above is None else above,
        "maximum": maximum if below is None else below,
        "choices": choices,
        "exclusive_minimum": above is not None,
        "exclusive_maximum": below is not None,
    }
    if isinstance(default, (list, dict)):
        return field(default_factory=lambda: type(default)(default), metadata=metadata)
    return field(default=default, metadata=metadata)
