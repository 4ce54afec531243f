"""MindSpeed-RL: sizes in prompts, NPUs of the actor over the ways that share a model."""

from ballast.migrate.rules import (
    Recipe,
    Settings,
    above_0,
    add_mini_batches,
    ranks_of_a_model,
)

PROMPTS = "megatron_training.global_batch_size"
KEPT_PROMPTS = "rl_config.filter_groups_train_batch_size"
MINI_BATCH = "rl_config.mini_batch_size"
DEVICES = "rl_config.actor_resource.num_npus"
KL_IN_REWARD = "rl_config.use_kl_in_reward"
KEYS = (MINI_BATCH, DEVICES, KL_IN_REWARD, "actor_config.micro_batch_size")


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """rl_config.py multiplies mini_batch_size by the samples of a prompt, and 1 is its default."""
    prompts = KEPT_PROMPTS if KEPT_PROMPTS in recipe else PROMPTS
    if prompts in recipe:
        settings["batch.prompts_per_step"] = recipe[prompts]
        sizes = {MINI_BATCH: 1, **recipe}
        add_mini_batches(sizes, settings, to_decide, MINI_BATCH, prompts, "")
    if devices := above_0(recipe.get(DEVICES)):
        sharing = ranks_of_a_model(settings)
        formula = f"{DEVICES} {devices} / {sharing} of one model"
        settings.compute("policy.data_parallel", max(1, devices // sharing), formula)
    settings["rollout.placement"] = "colocated"
    if recipe.get(KL_IN_REWARD) is True:
        for name in ("coefficient", "estimator"):
            if f"algorithm.loss.kl_{name}" in settings:
                value = settings.pop(f"algorithm.loss.kl_{name}")
                settings[f"algorithm.kl_in_reward.{name}"] = value
