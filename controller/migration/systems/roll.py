"""ROLL: the size of an update is that of one rank."""

from controller.migration.rules import Recipe, Settings

SIZE = "actor_train.training_args.per_device_train_batch_size"
KEYS = (SIZE, "actor_train.training_args.gradient_accumulation_steps")


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    if SIZE in recipe:
        to_decide.append(
            f"batch.mini_batches: rollout_batch_size x num_return_sequences_in_group / ({SIZE}="
            f"{recipe[SIZE]} x gradient_accumulation_steps x data-parallel ranks)."
        )
