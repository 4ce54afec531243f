"""Recipes of nine systems, abridged, each beside what its own system reads in it.

recipes/SYSTEM.yaml: a list of recipes, each with `file` (its kind), `text`, `command`, `reads` (the system's
reading in settings of ours: its units and its defaults), `open` (settings that depend on what is not in the
file) and `why` (the line of the system's code).
"""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ballast.migrate.reading import read_recipe
from ballast.migrate.translation import migrate
from workers.errors import ConfigError

RECIPES = [
    recipe
    for path in sorted((Path(__file__).parent / "recipes").glob("*.yaml"))
    for recipe in yaml.safe_load(path.read_text(encoding="utf-8"))
]


@pytest.mark.drawn(30)
@pytest.mark.parametrize(
    "recipe", RECIPES, ids=lambda recipe: f"{recipe['system']}-{recipe['name']}"
)
def test_a_recipe_means_what_its_own_system_reads(
    recipe: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path(recipe["file"]).write_text(recipe["text"])
    source = read_recipe([recipe["file"]])
    if recipe["command"] == "refused":
        with pytest.raises(ConfigError):
            migrate(source)
        return
    migration = migrate(source)
    assert (migration.system, migration.command.module) == (
        recipe["system"],
        recipe["command"],
    )
    known = migration.command.known
    read = {key: migration.settings.get(key, known[key].default) for key in recipe["reads"]}
    assert read == recipe["reads"]
    asked = [
        key
        for key in recipe.get("open", ())
        if not any(line.startswith(key) for line in migration.open)
    ]
    assert not asked, migration.open


def test_there_are_forty_recipes_of_seven_systems() -> None:
    assert len(RECIPES) >= 40
    assert len({recipe["system"] for recipe in RECIPES}) >= 7
