"""NeMo-RL: the size of an update is a number of sequences."""

from controller.migration.rules import Recipe, Settings, add_mini_batches

SIZES = ("policy.train_global_batch_size", "grpo.num_prompts_per_step", "grpo.num_generations_per_prompt")
KEYS = (SIZES[0],)


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    add_mini_batches(recipe, settings, to_decide, *SIZES)
