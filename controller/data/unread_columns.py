"""Find columns that look like data and that nothing reads.

records, names that are read --unread_columns--> a warning
"""

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

from controller.data.image_columns import (
    COMPARED,
    columns_where,
    looks_like_images,
    looks_like_other_media,
)
from controller.data.records import Record

CHATS = {"tools", "chat_template_arguments"}
"""Columns that are read beside chat messages alone."""
_NAMES = {"messages", "conversation", "conversations", "tools", "functions"}
_EMPTY = ("", "[]", "{}", "null")


def names_in(config: Any, names: Collection[str]) -> set[str]:
    """Return the names that are a setting's value, or stand as `{name}` in one, such as a judge's prompt."""
    texts = set(_texts(config))
    return {name for name in names if name in texts or _is_placeholder(name, texts)}


def _is_placeholder(name: str, texts: Iterable[str]) -> bool:
    return any(f"{{{name}" in text for text in texts)


def unread_columns(
    data: Mapping[str, Sequence[Record]], read: Collection[str]
) -> list[str]:
    """Return a warning that names columns outside `read` that look like data in one of the first records.

    data: by path. Each column is named once.
    """
    warnings = []
    named = set(read)
    for path, records in data.items():
        data_columns = columns_where(_looks_like_data, records[:COMPARED])
        unread = [name for name in data_columns if name not in named]
        named |= set(unread)
        if unread:
            columns = f"column{'s' * (len(unread) > 1)} {', '.join(map(repr, unread))}"
            advice = ", or give the prompts as chat messages" if CHATS & set(unread) else ""
            has_media = columns_where(looks_like_other_media, records[:COMPARED])
            media = (
                ". Videos and sounds are never read" if set(has_media) & set(unread) else ""
            )
            warnings.append(
                f"{path}: nothing reads the {columns}: no setting, chat template or reward. Set a "
                f"data.*_key to it{advice}, or remove it{media}"
            )
    return warnings


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif is_dataclass(value):
        for field in fields(value):
            yield from _texts(getattr(value, field.name))
    elif isinstance(value, Mapping):
        yield from _texts(list(value.values()))
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from _texts(inner)


def _looks_like_data(name: str, value: Any) -> bool:
    if (
        isinstance(value, bytes)
        or looks_like_images(name, value)
        or looks_like_other_media(name, value)
    ):
        return True
    if name in _NAMES and isinstance(value, str):
        return value.strip() not in _EMPTY
    return isinstance(value, list) and any(isinstance(inner, dict) for inner in value[:1])
