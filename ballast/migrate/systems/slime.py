"""slime and miles: sizes in sequences, engines in GPUs, a critic with the policy's optimiser."""

from collections.abc import Mapping
from typing import Any

from ballast.migrate.rules import (
    JOB_FLAGS,
    Recipe,
    Settings,
    above_0,
    add_mini_batches,
    ask_for_ratios,
    ask_for_steps,
    count,
    function_of,
    move_discount,
    set_data_parallel,
    set_validation,
)

SIZES = ("global-batch-size", "rollout-batch-size", "n-samples-per-prompt")
KEYS = (
    SIZES[0],
    "min-lr",
    "actor-num-nodes",
    "actor-num-gpus-per-node",
    "rollout-num-gpus",
    "rollout-function-path",
    "dynamic-sampling-filter-path",
    "custom-rm-path",
    "rm-type",
    "custom-generate-function-path",
    "eval-prompt-data",
    "multimodal-keys",
    "use-opd",
    "opd-teacher-load",
)
FILTER = "filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"


def prepare(recipe: Recipe, to_decide: list[str]) -> Mapping[str, Any]:
    """Drop what nothing reads without its switch, and add the program where it is the asynchronous one."""
    keys = {
        key.replace("_", "-"): value
        for key, value in recipe.items()
        if key not in JOB_FLAGS
    }
    if not keys.get("use-opd"):
        keys.pop("opd-kl-coef", None)
    if keys.get("advantage-estimator", "grpo") in ("grpo", "gspo", "cispo"):
        keys.pop("kl-coef", None)
    if "eval-interval" not in keys:
        keys.pop("eval-prompt-data", None)
    if "train_async.py" in getattr(recipe, "program", ""):
        keys["train_async.py"] = True
    return keys


def derive(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    add_mini_batches(recipe, settings, to_decide, *SIZES)
    nodes = count(recipe, "actor-num-nodes", 1, to_decide)
    set_data_parallel(
        settings, nodes, count(recipe, "actor-num-gpus-per-node", 8, to_decide)
    )
    gpus_of_engines = above_0(recipe.get("rollout-num-gpus"))
    if settings.get("rollout.placement") == "apart" and gpus_of_engines:
        ranks = settings.get("rollout.tensor_parallel", 1)
        formula = f"rollout-num-gpus {gpus_of_engines} / {ranks} of one engine"
        settings.compute("rollout.replicas", max(1, gpus_of_engines // ranks), formula)
    _lengths(recipe, settings, to_decide)
    _optimisers(recipe, settings)
    _algorithm(recipe, settings, to_decide)
    _validation(recipe, settings, to_decide)
    if "fully_async" in str(recipe.get("rollout-function-path")):
        settings["rollout.max_staleness"] = 1
        to_decide.append(
            "rollout.max_staleness=1: more there, as many as engines take. Raise it."
        )
    elif path := recipe.get(
        "custom-generate-function-path", recipe.get("rollout-function-path")
    ):
        to_decide.append(
            f"rollout.agent: {path} samples there. Name an agent or environment of yours."
        )
    if not recipe.get("use-rollout-logprobs"):
        ask_for_ratios(settings, to_decide)
    if "num-rollout" not in recipe:
        ask_for_steps(recipe.get("num-epoch", "num-epoch"), settings, to_decide)
    images = recipe.get("multimodal-keys")
    if isinstance(images, Mapping) and "image" in images:
        settings["data.image_key"] = images["image"]


def _lengths(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    if "rollout-max-prompt-len" in recipe:
        return
    if context := above_0(recipe.get("rollout-max-context-len")):
        response = above_0(settings.get("rollout.sampling.max_new_tokens"))
        formula = f"rollout-max-context-len {context} - {response} of a response"
        prompt = settings.compute(
            "data.max_prompt_tokens", max(1, context - response), formula
        )
        to_decide.append(
            f"data.max_prompt_tokens={prompt}: a whole response fits behind it. There it is {context - 1}."
        )
    else:
        to_decide.append(
            "data.max_prompt_tokens: no limit there. 1024 here, longer ones are dropped."
        )


def _optimisers(recipe: Recipe, settings: Settings) -> None:
    rate = settings.get("policy.optimizer.learning_rate", 1e-6)
    if isinstance(recipe.get("min-lr"), int | float):
        least = recipe["min-lr"]
        settings.compute(
            "policy.optimizer.final_learning_rate_ratio",
            least / rate,
            f"min-lr {least} / {rate}",
        )
    if settings.get("algorithm.advantage") == "gae":
        for key, value in list(settings.items()):
            if key.startswith("policy.optimizer."):
                settings.setdefault(key.replace("policy", "critic", 1), value)
        settings.setdefault("critic.optimizer.learning_rate", rate)


def _algorithm(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    move_discount(settings, ("reinforce_plus_plus", "reinforce_plus_plus_baseline"))
    if settings.get("algorithm.loss.name") == "gspo":  # auto is the same mean
        settings.pop("algorithm.loss.aggregation", None)
    advantage = settings.get("algorithm.advantage", "grpo")
    if recipe.get("normalize-advantages") and advantage == "grpo":
        to_decide.append(
            "algorithm.advantage=grpo: normalize-advantages has no counterpart with it."
        )
    if settings.get("algorithm.kl_in_reward.coefficient"):
        settings["algorithm.kl_in_reward.estimator"] = settings.get(
            "algorithm.loss.kl_estimator", "k3"
        )
    if path := recipe.get("dynamic-sampling-filter-path"):
        settings["algorithm.zero_variance_groups"] = "replace"
        if not str(path).endswith(FILTER):
            settings["algorithm.group_filter"] = function_of(str(path))
    if path := recipe.get("custom-rm-path"):
        function = settings["reward.function"] = function_of(str(path))
        to_decide.append(
            f"reward.function={function}: its arguments differ, see docs/your-own.md."
        )
    elif "rm-type" in recipe:
        to_decide.append(
            f"reward.function: rm-type {recipe['rm-type']} there. Write a function."
        )
    if recipe.get("use-opd"):
        settings.setdefault("algorithm.loss.distillation.coefficient", 1.0)
        settings["algorithm.loss.distillation.over"] = "token"
        teacher = settings["teacher.path"] = str(
            recipe.get("opd-teacher-load", "models/teacher")
        )
        to_decide.append(
            f"teacher.path={teacher}: name the teacher's folder of Hugging Face."
        )


def _validation(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    value = recipe.get("eval-prompt-data")
    if not value:
        return
    pairs = isinstance(value, list) and len(value) > 1  # NAME PATH NAME PATH
    set_validation(value[1::2] if pairs else [value], settings, to_decide)
    for key in ("temperature", "top_p", "top_k"):
        if f"rollout.sampling.{key}" in settings:
            settings.setdefault(
                f"validation.sampling.{key}", settings[f"rollout.sampling.{key}"]
            )
