"""OpenRLHF: the size of an update is a number of sequences, by old and by present names."""

from controller.migration.rules import Recipe, Settings, add_mini_batches

OLD_SIZES = ("train_batch_size", "rollout_batch_size", "n_samples_per_prompt")
SIZES = ("train.batch_size", "rollout.batch_size", "rollout.n_samples_per_prompt")
KEYS = (OLD_SIZES[0], SIZES[0])


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    add_mini_batches(recipe, settings, to_decide, *OLD_SIZES)
    add_mini_batches(recipe, settings, to_decide, *SIZES)
