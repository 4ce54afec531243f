"""Keys that rules read may hold anything: a recipe comes out, or is refused in one line."""

from contextlib import suppress
from typing import Any

import pytest

from ballast.migrate import translation
from ballast.migrate.reading import Recipe
from ballast.migrate.systems import keys_of
from tests.ballast.migrate.test_counts import BASES
from workers.errors import ConfigError

ODD: list[Any] = [
    None,
    "x",
    "",
    -1,
    0,
    1e400,
    float("nan"),
    True,
    [],
    ["a"],
    [1, 2],
    [{"a": 1}],
    {"a": 1},
    "$X",
    10**30,
]


def keys(system: str) -> list[str]:
    """Of rules, and of the rows that fill a setting."""
    rows = [row.key for row in translation.ROWS if row.system == system and row.here]
    return [
        key.replace("*", "x")
        for key in dict.fromkeys([*keys_of(system), *rows, *BASES[system]])
    ]


@pytest.mark.drawn(8)
@pytest.mark.parametrize("value", ODD, ids=lambda value: str(value)[:12])
@pytest.mark.parametrize("system", BASES)
def test_odd_values_are_no_fault(
    system: str, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(translation, "_settle", lambda migration: None)
    for key in keys(system):
        with suppress(ConfigError):
            translation.migrate(Recipe(BASES[system] | {key: value}))
