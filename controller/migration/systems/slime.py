"""slime and miles: the size of an update is a number of sequences."""

from controller.migration.rules import Recipe, Settings, add_mini_batches

SIZES = ("global-batch-size", "rollout-batch-size", "n-samples-per-prompt")
KEYS = (SIZES[0],)


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    add_mini_batches(recipe, settings, to_decide, *SIZES)
