"""SkyRL: the size of an update is a number of sequences."""

from controller.migration.rules import Recipe, Settings, add_mini_batches

SIZES = ("trainer.policy_mini_batch_size", "trainer.train_batch_size", "")
KEYS = (SIZES[0],)


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    add_mini_batches(recipe, settings, to_decide, *SIZES)
