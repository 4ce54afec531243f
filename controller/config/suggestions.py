"""Suggest a setting for a key that is none: the nearest name, or what another system's is called here."""

import difflib
from collections.abc import Iterable

from controller.config.aliases import answer


def suggestion(key: str, keys: list[str]) -> str:
    near = max(keys, key=lambda other_key: _nearness(key, other_key))
    alike, _ = _nearness(key, near)
    if advice := answer(key, keys, exact=alike == 1):
        return f"{advice}. See docs/migration.md."
    if alike:
        return f"did you mean {near}?"
    section = key
    while section and not any(other_key.startswith(f"{section}.") for other_key in keys):
        section = section.rpartition(".")[0]
    start = f"{section}." if section else ""
    below = dict.fromkeys(
        other_key.removeprefix(start).partition(".")[0]
        for other_key in keys
        if other_key.startswith(start)
    )
    return f"{section or 'the configuration'} has {', '.join(below)}."


def _nearness(key: str, other_key: str) -> tuple[float, int]:
    """Rate how close the setting `other_key` is to `key`, or 0 if the name or a written section differs.

    Sections may be left out but not ignored: `custom_reward_function.name` is not close to `run.name`.
    """
    *sections, name = key.split(".")
    *other_sections, last = other_key.split(".")
    alike = difflib.SequenceMatcher(None, name, last).ratio()
    candidates = iter(other_sections)
    # One iterator for all: sections may be left out between two, not exchanged.
    sections_fit = all(_has_similar(candidates, section) for section in sections)
    return (alike if sections_fit and alike > 0.7 else 0, -len(other_sections))


def _has_similar(names: Iterable[str], name: str) -> bool:
    return any(
        difflib.SequenceMatcher(None, name, other_name).ratio() > 0.8
        for other_name in names
    )
