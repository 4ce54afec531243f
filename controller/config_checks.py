"""Checks of a configuration as a whole: impossible combinations, settings without effect, missing files.

    check(config) --> nothing, or ConfigError: one line that names the settings and what to change

Nothing is imported or started for it: models are read by their config.json, reward functions by their symbol table.
What a cluster can give is known only to Ray and is checked when the placement groups are reserved.
"""

import math
import os
import re
import sys
from importlib.machinery import PathFinder
from pathlib import Path
from symtable import symtable
from typing import Any

from controller.config import Config
from controller.config_file import settings, value_of
from controller.model_files import ModelFiles, read_model_files
from controller.records import iter_records
from workers.errors import ConfigError, DataError


def check(config: Config) -> None:
    """Raise ConfigError at the first thing that cannot work or means nothing. Takes well under a second."""
    _check_settings_have_effect(config)
    _check_run(config)
    _check_batch(config)
    _check_optimizer(config)
    _check_sampling(config)
    _check_overlong(config)
    _check_caps(config)
    _check_devices(config)
    model = read_model_files(config.model.path, "model.path")
    _check_model(config, model)
    _check_reference(config, model)
    _check_data(config, model)
    _check_rewards(config)


NO_EFFECT_WITHOUT = (
    (
        "batch.mini_batches above 1 (the only update of a step starts where the samples came from: all ratios are 1)",
        lambda c: c.batch.mini_batches > 1,
        ("policy.forward_max_tokens", "algorithm.loss.clip_low", "algorithm.loss.clip_high"),
    ),
    (
        "engines on CPUs",
        lambda c: not c.uses_gpus,
        ("rollout.cpu_kv_cache_gib", "rollout.threads"),
    ),
    (
        "a local Ray",
        lambda c: not c.resources.ray_address,
        ("resources.dashboard",),
    ),
    (
        "algorithm.loss.kl_coefficient above 0",
        lambda c: c.uses_reference,
        ("reference.", "algorithm.loss.kl_estimator"),
    ),
    (
        "policy.optimizer.schedule=linear or cosine",
        lambda c: c.policy.optimizer.schedule != "constant",
        ("policy.optimizer.total_steps",),
    ),
    (
        "data.validation",
        lambda c: bool(c.data.validation),
        ("validation.",),
    ),
    (
        "algorithm.groups_without_signal=replace",
        lambda c: c.algorithm.groups_without_signal == "replace",
        ("algorithm.max_sampling_rounds",),
    ),
    (
        "reward.overlong_tokens above 0",
        lambda c: c.reward.overlong_tokens > 0,
        ("reward.overlong_penalty",),
    ),
    (
        "validation.samples above 1",
        lambda c: c.validation.samples > 1,
        ("validation.success",),
    ),
    (
        "data.curriculum left empty (it orders every epoch itself)",
        lambda c: not c.data.curriculum,
        ("data.shuffle",),
    ),
    (
        "GPUs",
        lambda c: c.uses_gpus,
        ("policy.cpu_offload", "reference.cpu_offload", "rollout.memory_fraction", "rollout.enforce_eager"),
    ),
)
"""(what is needed, whether it is there, keys or sections that do nothing without it)"""


def _check_settings_have_effect(config: Config) -> None:
    for needed, is_there, prefixes in NO_EFFECT_WITHOUT:
        if is_there(config):
            continue
        for found in settings(Config()):
            value = value_of(config, found.key)
            if found.key.startswith(prefixes) and value != found.default and not found.follows:
                raise ConfigError(
                    f"{found.key}={value} has no effect without {needed}; set that, or remove {found.key}."
                )


def _check_run(config: Config) -> None:
    if not re.fullmatch(r"\w[\w.=+-]*", config.run.name):
        raise ConfigError(
            f"run.name={config.run.name!r} names a folder below run.dir; use letters, digits and any of _ . = + -."
        )
    if config.run_folder.exists():
        raise ConfigError(f"run.name: {config.run_folder} holds a run already; choose another name or remove it.")
    existing = config.run_folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir() or not os.access(existing, os.W_OK | os.X_OK):
        raise ConfigError(f"run.dir: {config.run_folder} cannot be written, {existing} is not a writable folder.")
    if config.resources.ray_address.startswith("ray://"):
        raise ConfigError(
            f"resources.ray_address={config.resources.ray_address}: Ray Client is not supported; start the run inside "
            "the cluster with `ray job submit`."
        )


def _check_batch(config: Config) -> None:
    samples, sequences = config.rollout.samples_per_prompt, config.sequences_per_step
    if config.algorithm.advantage == "grpo" and samples == 1:
        raise ConfigError(
            "rollout.samples_per_prompt=1 leaves algorithm.advantage=grpo nothing to compare: every advantage is 0; "
            "set it to 2 or more."
        )
    product = f"batch.prompts_per_step * rollout.samples_per_prompt = {sequences} sequences"
    if config.batch.mini_batches > sequences:
        raise ConfigError(
            f"batch.mini_batches={config.batch.mini_batches} is more than the {product} of a step; lower it."
        )
    smallest = config.mini_batch_sizes[-1]
    if config.policy.ranks > smallest:
        raise ConfigError(
            f"policy.ranks={config.policy.ranks} is more than the {smallest} sequences of a mini-batch ({product} over "
            f"batch.mini_batches={config.batch.mini_batches}); lower ranks or mini_batches, or sample more."
        )


def _check_optimizer(config: Config) -> None:
    warmup, total = config.policy.optimizer.warmup_steps, config.total_optimizer_steps
    if warmup > total or (warmup == total and config.policy.optimizer.schedule != "constant"):
        raise ConfigError(
            f"policy.optimizer.warmup_steps={warmup} is more than the {total} optimiser steps of the run "
            "(policy.optimizer.total_steps, or run.steps * batch.mini_batches); lower it."
        )


def _check_sampling(config: Config) -> None:
    if config.rollout.sampling.temperature == 0:
        raise ConfigError(
            "rollout.sampling.temperature=0 samples equal responses, which carry no signal; set it above 0 "
            "(validation.sampling.temperature may be 0)."
        )
    samples = config.validation.samples
    if samples > 1 and config.validation.sampling.temperature == 0:
        raise ConfigError(
            f"validation.samples={samples} at validation.sampling.temperature=0 are {samples} equal responses; "
            "set samples to 1 or the temperature above 0."
        )


def _check_overlong(config: Config) -> None:
    overlong, longest = config.reward.overlong_tokens, config.rollout.sampling.max_new_tokens
    if overlong >= longest:
        raise ConfigError(
            f"reward.overlong_tokens={overlong} punishes every response: it must be below "
            f"rollout.sampling.max_new_tokens={longest}."
        )


def _check_caps(config: Config) -> None:
    """A cap below the longest possible sequence would stop the run at the first batch that has one."""
    longest = config.longest_sequence
    parts = (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + "
        f"rollout.sampling.max_new_tokens={config.rollout.sampling.max_new_tokens} = {longest} tokens"
    )
    caps = {"policy.max_tokens": config.policy.max_tokens, "policy.forward_max_tokens": config.forward_max_tokens}
    if config.uses_reference:
        caps["reference.forward_max_tokens"] = config.reference_max_tokens
    for key, cap in caps.items():
        if cap < longest:
            raise ConfigError(
                f"{key}={cap} is below the longest possible sequence, {parts}; raise the cap or lower either."
            )
    needed = config.data.max_prompt_tokens + max(
        config.rollout.sampling.max_new_tokens,
        config.validation.sampling.max_new_tokens if config.data.validation else 0,
    )
    if config.max_model_tokens < needed:
        raise ConfigError(
            f"rollout.max_model_tokens={config.max_model_tokens} is below the {needed} tokens that "
            "data.max_prompt_tokens and max_new_tokens (of rollout.sampling or validation.sampling) allow; raise it or "
            "leave it at 0."
        )


def _check_devices(config: Config) -> None:
    """bfloat16 on CPU is allowed: it works, and it is how a GPU run's rounding is looked at without one."""
    placement = config.rollout_placement
    if placement in ("colocated", "apart") and not config.uses_gpus:
        raise ConfigError(
            f"rollout.placement={placement} needs GPUs and resources.device={config.resources.device} gives none here; "
            "set rollout.placement=auto, or resources.device=cuda for a cluster with GPUs."
        )
    if placement == "shared_memory" and config.uses_gpus:
        raise ConfigError(
            "rollout.placement=shared_memory is for CPUs and the run uses GPUs; set colocated or apart, "
            "or resources.device=cpu."
        )
    engine_gpus = config.rollout.replicas * config.rollout.tensor_parallel
    if placement == "colocated" and engine_gpus > config.policy.ranks:
        raise ConfigError(
            f"rollout.replicas * rollout.tensor_parallel = {engine_gpus} GPUs are more than the policy.ranks="
            f"{config.policy.ranks} that they share; lower them, raise policy.ranks, or set rollout.placement=apart."
        )
    _check_attention(config)


def _check_attention(config: Config) -> None:
    if config.model.attention != "varlen":
        return
    if not config.uses_gpus:
        raise ConfigError("model.attention=varlen is a CUDA kernel and the run uses CPUs; set auto or sdpa.")
    if config.model.dtype == "float32":
        raise ConfigError(
            "model.attention=varlen takes half precision only; set model.dtype=bfloat16, or attention=sdpa."
        )


def _check_model(config: Config, model: ModelFiles) -> None:
    if model.positions is not None and config.max_model_tokens > model.positions:
        raise ConfigError(
            f"prompt and response may reach {config.max_model_tokens} tokens, but {config.model.path} takes "
            f"{model.positions}; lower data.max_prompt_tokens, max_new_tokens or rollout.max_model_tokens."
        )
    parallel, heads, pairs = config.rollout.tensor_parallel, model.attention_heads, model.key_value_heads
    if heads is not None and heads % parallel:
        raise ConfigError(
            f"rollout.tensor_parallel={parallel} does not divide the {heads} attention heads of {config.model.path}."
        )
    if pairs is not None and pairs % parallel and parallel % pairs:
        raise ConfigError(
            f"rollout.tensor_parallel={parallel} neither divides nor is a multiple of the {pairs} key-value heads of "
            f"{config.model.path}."
        )


def _check_reference(config: Config, model: ModelFiles) -> None:
    if not config.reference.path:
        return
    reference = read_model_files(config.reference.path, "reference.path")
    if reference.vocabulary != model.vocabulary:
        raise ConfigError(
            f"reference.path={config.reference.path} has {reference.vocabulary} tokens and "
            f"model.path={config.model.path} {model.vocabulary}; a KL needs the same vocabulary."
        )
    if reference.positions is not None and config.longest_sequence > reference.positions:
        raise ConfigError(
            f"sequences may reach {config.longest_sequence} tokens, but reference.path={config.reference.path} takes "
            f"{reference.positions}; lower data.max_prompt_tokens or rollout.sampling.max_new_tokens."
        )


def _check_data(config: Config, model: ModelFiles) -> None:
    _check_sources(config)
    paths = [("data.sources" if config.data.sources else "data.train", path) for path in config.data.weights]
    if config.data.validation:
        paths.append(("data.validation", config.data.validation))
    for key, path in paths:
        record = first_record(key, path, config.data.prompt_key)
        _check_prompt(config, model, f"{key}: the prompts of {path}", record[config.data.prompt_key])
        if config.data.source_key and config.data.source_key not in record:
            raise ConfigError(
                f"{key}: the first record of {path} has no column data.source_key={config.data.source_key!r}."
            )
    if config.data.curriculum:
        check_function("data.curriculum", config.data.curriculum)


def _check_sources(config: Config) -> None:
    if bool(config.data.train) == bool(config.data.sources):
        raise ConfigError("data.train is not set; set it, or data.sources with several of them, and not both.")
    for path, weight in config.data.sources.items():
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"data.sources: the weight of {path} must be above 0, not {weight}.")


def _check_prompt(config: Config, model: ModelFiles, which: str, prompt: Any) -> None:
    if not isinstance(prompt, (str, list)):
        raise ConfigError(
            f"{which} (data.prompt_key={config.data.prompt_key}) must be strings or lists of chat messages, not "
            f"{type(prompt).__name__}."
        )
    if isinstance(prompt, list) and not model.chat_template:
        raise ConfigError(
            f"{which} are chat messages, but the tokenizer of model.path={config.model.path} has no chat template."
        )
    if isinstance(prompt, str) and config.data.system_prompt:
        raise ConfigError(f"{which} are texts, but data.system_prompt goes before chat messages; remove it.")


def first_record(key: str, path: str, prompt_key: str) -> dict[str, Any]:
    """The first record of a data set. Raises ConfigError, naming `key`, if there is none with a prompt."""
    try:
        record = next(iter_records(path, prompt_key), None)
    except DataError as error:
        raise ConfigError(f"{key}: {error}") from None
    if record is None:
        raise ConfigError(f"{key}: {path} has no records.")
    return record


def _check_rewards(config: Config) -> None:
    if bool(config.reward.function) == bool(config.reward.functions):
        raise ConfigError("reward.function is not set; set it, or reward.functions with several of them, and not both.")
    key = "reward.functions" if config.reward.functions else "reward.function"
    names: dict[str, str] = {}
    for function, weight in config.reward.weights.items():
        check_function(key, function)
        if not math.isfinite(weight):
            raise ConfigError(f"{key}: the weight of {function} must be a finite number, not {weight}.")
        other = names.setdefault(function.rpartition(":")[2], function)
        if other != function:
            raise ConfigError(f"{key}: {other} and {function} have the same name in metrics; rename one of them.")


def check_function(key: str, name: str) -> None:
    """Find `module:function` or `path/file.py:function` without importing it.

    Raises ConfigError if the name is malformed, the file is not there or does not compile, or lacks the function.
    """
    match = re.fullmatch(r"(.+\.py|[A-Za-z_]\w*(?:\.\w+)*):([A-Za-z_]\w*)", name)
    if match is None:
        raise ConfigError(f"{key}={name!r} must be module:function or path/file.py:function.")
    place, function = match.groups()
    path = Path(place) if place.endswith(".py") else _module_file(place)
    if path is None or not path.is_file():
        what = f"file {place}" if place.endswith(".py") else f"module {place} in the working directory or installed"
        raise ConfigError(f"{key}={name!r}: there is no {what}.")
    try:
        names = symtable(path.read_text(encoding="utf-8"), str(path), "exec")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"{key}={name!r}: {path} is not valid Python: {error}.") from None
    if function not in names.get_identifiers() or not _is_bound(names, function):
        raise ConfigError(f"{key}={name!r}: {path} defines no {function}.")


def _module_file(name: str) -> Path | None:
    """Where a module's source lies, found as `import` would, but without running its packages."""
    path: list[str] | None = [str(Path.cwd()), *sys.path]
    for part in name.split("."):
        # By its last name alone: of a dotted one, a namespace package would look its parent up in sys.modules.
        spec = PathFinder.find_spec(part, path)
        if spec is None:
            return None
        path = list(spec.submodule_search_locations or [])
    return Path(spec.origin) if spec and spec.origin else None


def _is_bound(names: Any, function: str) -> bool:
    symbol = names.lookup(function)
    return bool(symbol.is_assigned() or symbol.is_imported())
