"""TRL: completions of a step over those of a group, of one GPU unless the recipe says their number."""

from controller.migration.rules import Recipe, Settings, ask_for_steps, count
from controller.migration.systems.trl_rewards import FUNCTIONS, TOOLS, WEIGHTS, add_rewards, name_tools

KEYS = (
    "generation_batch_size",
    "steps_per_generation",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "max_steps",
    "num_train_epochs",
    FUNCTIONS,
    WEIGHTS,
    TOOLS,
)


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    add_rewards(recipe, settings, to_decide)
    name_tools(recipe, to_decide)
    group = count(recipe, "num_generations", 8, to_decide)
    accumulated = count(recipe, "gradient_accumulation_steps", 1, to_decide)
    of_a_device = count(recipe, "per_device_train_batch_size", 8, to_decide)
    of_all = of_a_device * count(recipe, "steps_per_generation", accumulated, to_decide)
    completions = count(recipe, "generation_batch_size", of_all, to_decide)
    if "generation_batch_size" not in recipe:
        to_decide.append(f"batch.prompts_per_step={max(1, completions // group)}: of one GPU. Multiply it by yours.")
    settings["batch.prompts_per_step"] = max(1, completions // group)
    settings["batch.mini_batches"] = max(1, completions // (of_a_device * accumulated))
    updates = settings["batch.mini_batches"] * settings.get("batch.epochs", 1)
    if recipe.get("max_steps", -1) != -1:
        settings["run.steps"] = max(1, count(recipe, "max_steps", 100, to_decide) // updates)
    ask_for_steps(recipe.get("num_train_epochs", 3), settings, to_decide)
    if settings.get("algorithm.loss.aggregation") == "sequence_mean_token_sum_norm":
        settings["algorithm.loss.constant_length"] = settings.get("rollout.sampling.max_new_tokens", 512)
