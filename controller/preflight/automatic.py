"""Say what settings of `auto` choose.

Config --automatic_choices--> {"model.dtype": "bfloat16", ...}, for the page of `--dry-run`
"""

from collections.abc import Callable
from typing import Any

from controller.config import TrainingConfig
from controller.config.file import settings
from workers.config.loss import automatic_aggregation
from workers.model.rules.families import KERNEL_FEATURES, features_of_file
from workers.model.rules.model_rules import compiles, kernel_problem


def automatic_choices(config: TrainingConfig) -> dict[str, str]:
    """Return what each setting chooses that is `auto` and has an effect. Raises ConfigError
    without a model.
    """
    automatic = [
        setting.key
        for setting in settings(config)
        if setting.default == "auto" and setting.key in CHOICES
    ]
    chosen = {key: CHOICES[key](config) for key in automatic}
    return {key: choice for key, choice in chosen.items() if choice}


def _attention(config: TrainingConfig) -> str:
    """Name the kernels in order of preference. Workers take the first that their card and packages have."""
    if (
        config.policy.parallel.context_parallel > 1
        and config.policy.parallel.context_parallel_method == "ring"
    ):
        return ""  # ring attention has kernels of its own
    if config.model.batch_invariant:
        return "that of the engines (vLLM's Triton kernel)"
    layout = config.model.attention_layout(shared=config.shares_model)
    half = config.compute_dtype == "bfloat16"
    features = features_of_file(config.model_description())
    able = [
        kernel
        for kernel, computed in KERNEL_FEATURES[layout].items()
        if features <= computed
        and not kernel_problem(kernel, layout, cuda=config.uses_gpus, half=half)
    ]
    return (
        able[0] if len(able) == 1 else f"the first that workers have of {', '.join(able)}"
    )


def _share_prefixes(config: TrainingConfig) -> str:
    return config.decide_prefixes(config.model).share_prefixes


def _gradient_checkpointing(config: TrainingConfig) -> str:
    return "by the memory of a GPU, at the start" if config.uses_gpus else "none"


def _compile(config: TrainingConfig) -> str:
    images = "vision_config" in config.model_description()
    return _always(
        compiles(config.model, config.policy.parallel, cuda=config.uses_gpus, images=images)
    )


def _order(config: TrainingConfig) -> str:
    from balancing.plan_settings import default_order

    pipelined = config.policy.parallel.pipeline_parallel > 1
    return default_order(config.balance.algorithm, pipelined=pipelined)


def _history(config: Any) -> str:
    return str(config.history) if config.rollout.plays_episodes else ""


def _kept_caches(config: Any) -> str:
    updates = config.rollout.max_staleness
    return f"keep, for {updates} update{'s' * (updates > 1)}" if updates else ""


def _always(holds: bool) -> str:
    return "always" if holds else "never"


CHOICES: dict[str, Callable[[Any], str]] = {
    "resources.device": lambda config: config.device,
    "model.dtype": lambda config: config.compute_dtype,
    "model.attention": _attention,
    "model.share_prefixes": _share_prefixes,
    "model.gradient_checkpointing": _gradient_checkpointing,
    "model.compile": _compile,
    "rollout.placement": lambda config: config.rollout_placement,
    "rollout.kv_cache_after_update": _kept_caches,
    "rollout.history": _history,
    "algorithm.loss.aggregation": lambda config: automatic_aggregation(
        config.algorithm.loss.name
    ),
    "policy.parallel.context_parallel_degree": lambda config: "by micro-step",
    "balance.order": _order,
    "balance.fit_cost_model": lambda config: _always(config.refits_cost_model),
    "loss.log_probs": lambda config: "mean" if config.loss.averages else "sum",
}
"""Of all commands. Empty: no effect in this run."""
