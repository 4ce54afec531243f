"""verl's on-policy distillation: a teacher's divergence in the loss, with or without rewards.

distillation.* --derive_distillation--> algorithm.loss.distillation, teacher, no advantages without rewards
"""

from typing import Any

from ballast.migrate.rules import Recipe, Settings, is_on, number

ENABLED = "distillation.enabled"
LOSS = "distillation.distillation_loss."
TEACHERS = "distillation.teacher_models."
ONLY_TEACHER = "teacher_model"
OURS = "algorithm.loss.distillation"
KEYS = (
    ENABLED,
    f"{LOSS}loss_mode",
    f"{LOSS}use_policy_gradient",
    f"{LOSS}use_task_rewards",
    f"{LOSS}distillation_loss_coef",
    f"{TEACHERS}*.model_path",
    f"{TEACHERS}*.key",
)
OF_SAMPLED_TOKEN = ("k1", "kl")
OF_LIKELIEST_TOKENS = "forward_kl_topk"
DEFAULT_MODE = "k3"
DEFAULT_TOP_K = 32  # of its YAML, which Hydra reads. The dataclass has another


def derive_distillation(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """Set the loss and the teachers of a recipe that distils."""
    if not is_on(recipe, ENABLED):
        return
    has_rewards = str(recipe.get(f"{LOSS}use_task_rewards", True)).lower() == "true"
    if not has_rewards:
        settings.compute("algorithm.advantage", "none", "use_task_rewards false")
    coefficient = number(recipe, f"{LOSS}distillation_loss_coef", 1.0)
    settings[f"{OURS}.coefficient"] = coefficient if has_rewards else 1.0
    _divergence(recipe, settings, to_decide)
    _teachers(recipe, settings, to_decide)


def _divergence(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    mode = recipe.get(f"{LOSS}loss_mode", DEFAULT_MODE)
    by_gradient = is_on(recipe, f"{LOSS}use_policy_gradient")
    if mode == OF_LIKELIEST_TOKENS:
        settings[f"{OURS}.over"] = "top_k"
        settings[f"{OURS}.divergence"] = "forward_kl"
        settings.setdefault(f"{OURS}.top_k", DEFAULT_TOP_K)
        is_same = not by_gradient
    else:
        settings[f"{OURS}.over"] = "token"
        is_same = mode in OF_SAMPLED_TOKEN and by_gradient
    if not is_same:
        to_decide.append(
            f"{OURS}.over={settings[f'{OURS}.over']}: the nearest to loss_mode={mode} with "
            f"use_policy_gradient={str(by_gradient).lower()}, whose gradient is another."
        )


def _teachers(recipe: Recipe, settings: Settings, to_decide: list[str]) -> None:
    """Name the teachers. Beside others, the entry `teacher_model` is dropped there."""
    paths = _values_by_teacher(recipe, "model_path")
    names = _values_by_teacher(recipe, "key")
    if len(paths) > 1:
        paths.pop(ONLY_TEACHER, None)
    if len(paths) > 1:
        settings["teacher.paths"] = {
            str(names.get(teacher, teacher)): path for teacher, path in paths.items()
        }
        settings.setdefault("teacher.key", "data_source")
        return
    path = next(iter(paths.values()), None)
    if path is None or "$" in str(path):
        to_decide.append("teacher.path=models/teacher: a placeholder. Name yours.")
        path = "models/teacher"
    settings["teacher.path"] = str(path)


def _values_by_teacher(recipe: Recipe, name: str) -> dict[str, Any]:
    return {
        key.removeprefix(TEACHERS).removesuffix(f".{name}"): value
        for key, value in recipe.items()
        if key.startswith(TEACHERS) and key.endswith(f".{name}") and value is not None
    }
