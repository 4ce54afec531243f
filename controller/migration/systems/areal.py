"""AReaL: its sizes are those of a step."""

from controller.migration.rules import Recipe, Settings

KEYS: tuple[str, ...] = ()


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """Nothing follows from several keys."""
