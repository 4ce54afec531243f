"""Checks of a configuration as a whole: impossible combinations, settings without effect, missing files.

    check(config) --> nothing, or ConfigError: one line that names the settings and what to change

Nothing is imported or started for it: models are read by their config.json, reward functions by their symbol table.
What a cluster can give is known only to Ray and is checked when the placement groups are reserved.
"""

import math
import os
import re
import tempfile
from pathlib import Path
from typing import Any

from controller.checkpoint import checkpoints_at
from controller.cluster_address import check_address
from controller.config import Config, TrainingConfig
from controller.config.function_files import check_function
from controller.config.model_files import ModelFiles, read_model_files
from controller.preflight.column_checks import check_column_names, check_columns_are_there
from controller.preflight.count_checks import check_counts
from controller.preflight.critic_checks import check_critic, check_reward_model, check_same_vocabulary
from controller.preflight.effects import check_settings_have_effect
from controller.preflight.loss_checks import check_kl_correction, check_token_returns
from controller.preflight.model_sizes import check_model_sizes
from controller.preflight.model_support import check_supported_model
from controller.preflight.model_types import CAUSAL, check_model_type
from controller.preflight.tracker_checks import check_trackers
from controller.preflight.validation_checks import check_counted_metric
from controller.preflight.weights import HEAD, check_weights
from controller.records import iter_records
from workers.errors import CheckpointError, ConfigError, DataError
from workers.rollout.engine_options import check_engine_options
from workers.rollout.placement import fits_device

LONGEST_FILE_NAME = 255  # NAME_MAX of every usual file system


def check(config: Config) -> None:
    """Raise ConfigError at the first thing that cannot work or means nothing. Takes well under a second."""
    check_settings_have_effect(config)
    check_run(config)
    _check_batch(config)
    check_counts(config)
    _check_loss(config)
    check_kl_correction(config)
    check_token_returns(config)
    check_warmup(config, config.total_optimizer_steps, "run.steps * batch.mini_batches * batch.epochs")
    _check_sampling(config)
    check_engine_options(config.rollout.engine)
    _check_environment(config)
    _check_overlong(config)
    _check_caps(config)
    _check_devices(config)
    model = read_model_files(config.model.path, "model.path")
    _check_model(config, model)
    check_parallel(config, model)
    _check_reference(config, model)
    check_critic(config, model)
    check_reward_model(config, model)
    _check_data(config, model)
    _check_rewards(config)
    check_trackers(config)


def check_run(config: TrainingConfig) -> None:
    """The run's name, folder, checkpoint to go on from and cluster."""
    if not re.fullmatch(r"\w[\w.=+-]*", config.run.name):
        raise ConfigError(
            f"run.name={config.run.name!r} names a folder below run.dir; use letters, digits and any of _ . = + -."
        )
    _check_path_lengths(config)
    if config.run_folder.exists() and config.run.resume != "auto":
        raise ConfigError(
            f"run.name: {config.run_folder} holds a run already; choose another name, remove it, or go on with it by "
            "run.resume=auto."
        )
    _check_resume(config.run.resume)
    _check_writable(config.run_folder)
    check_address(config)


def _check_writable(folder: Path) -> None:
    """By writing: permissions say nothing of a disk that is full or read-only, nor of what root may do below /proc."""
    existing = folder
    while not existing.exists() and existing != existing.parent:
        existing = existing.parent
    try:
        with tempfile.TemporaryDirectory(dir=existing, prefix=".ballast-"):
            pass
    except OSError:
        raise ConfigError(f"run.dir: {folder} cannot be written, {existing} is not a writable folder.") from None


def _check_path_lengths(config: TrainingConfig) -> None:
    """The kernel's limits, which every call on a file would otherwise meet in its own way."""
    length = len(os.fsencode(config.run.name))
    if length > LONGEST_FILE_NAME:
        raise ConfigError(
            f"run.name has {length} bytes and names a folder, which has at most {LONGEST_FILE_NAME}; shorten it."
        )


def _check_resume(resume: str) -> None:
    if resume in ("never", "auto"):
        return
    try:
        if not checkpoints_at(Path(resume)):
            raise ConfigError(f"run.resume={resume}: there is no complete checkpoint; it may also be auto or never.")
    except CheckpointError as error:
        raise ConfigError(f"run.resume: {error}") from None


def _check_batch(config: Config) -> None:
    sequences = config.sequences_per_step
    _check_advantage(config)
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


def _check_advantage(config: Config) -> None:
    algorithm, samples = config.algorithm, config.rollout.samples_per_prompt
    compares_groups = algorithm.advantage not in ("reinforce_plus_plus", "gae", "remax")
    if compares_groups and samples == 1:
        raise ConfigError(
            f"rollout.samples_per_prompt=1 leaves algorithm.advantage={algorithm.advantage} nothing to compare: every "
            "advantage is 0; set it to 2 or more."
        )
    if algorithm.advantage == "pass_at_k" and samples <= algorithm.pass_k:
        raise ConfigError(
            f"algorithm.pass_k={algorithm.pass_k} is not below rollout.samples_per_prompt={samples}: every advantage "
            "is 0; lower it, or sample more."
        )
    if algorithm.groups_without_signal != "keep" and not compares_groups:
        raise ConfigError(
            f"algorithm.groups_without_signal={algorithm.groups_without_signal} with algorithm.advantage="
            f"{algorithm.advantage} leaves out sequences that have an advantage; remove it."
        )
    if algorithm.kl_in_reward.coefficient:
        _check_kl_in_reward(config)


def _check_kl_in_reward(config: Config) -> None:
    algorithm, horizon = config.algorithm, config.algorithm.kl_in_reward.horizon
    if algorithm.groups_without_signal != "keep":
        raise ConfigError(
            f"algorithm.groups_without_signal={algorithm.groups_without_signal} with algorithm.kl_in_reward leaves out "
            "sequences that the penalty gives an advantage; remove it, or put the KL into the loss."
        )
    if algorithm.advantage == "maxrl":
        raise ConfigError(
            "algorithm.advantage=maxrl takes rewards as rates of success, and algorithm.kl_in_reward makes them "
            "negative; put the KL into the loss (algorithm.loss.kl_coefficient)."
        )
    if algorithm.kl_in_reward.target and horizon < config.sequences_per_step:
        raise ConfigError(
            f"algorithm.kl_in_reward.horizon={horizon} is below the {config.sequences_per_step} sequences of a step, "
            "so that the weight would jump; raise it, such as to 20 steps."
        )


def _check_loss(config: Config) -> None:
    loss = config.algorithm.loss
    if loss.name == "custom":
        check_function("algorithm.loss.function", loss.function, in_file=False)
        check_column_names(config.loss_columns)
    if loss.name in ("clip_cov", "kl_cov") and config.old_log_probs == "update":
        raise ConfigError(
            f"algorithm.loss.name={loss.name} chooses tokens by their old log-probs, which one update a step does not "
            "compute; set batch.mini_batches or batch.epochs to 2 or more."
        )
    if config.batch.epochs > 1 and loss.name == "reinforce":
        raise ConfigError(
            f"algorithm.loss.name=reinforce takes samples for the policy's own, which they are not any more after the "
            f"first of batch.epochs={config.batch.epochs}; set epochs to 1, or another loss."
        )
    if config.rollout.overlap and loss.name == "reinforce" and not loss.rollout_correction.is_on:
        raise ConfigError(
            "algorithm.loss.name=reinforce takes samples for the policy's own, but rollout.overlap=true makes them a "
            "version old; set algorithm.loss.rollout_correction.weights=token, or another loss."
        )
    if loss.aggregation == "sequence_mean_token_sum_norm" and not loss.constant_length:
        raise ConfigError(
            "algorithm.loss.aggregation=sequence_mean_token_sum_norm divides by algorithm.loss.constant_length, which "
            "is 0; set it, such as to rollout.sampling.max_new_tokens."
        )
    if 0 < loss.dual_clip <= 1:
        raise ConfigError(f"algorithm.loss.dual_clip={loss.dual_clip} must be above 1, or 0 for no dual clip.")
    if loss.clip_cov_low >= loss.clip_cov_high:
        raise ConfigError(
            f"algorithm.loss.clip_cov_low={loss.clip_cov_low} is not below clip_cov_high={loss.clip_cov_high}."
        )


def check_warmup(config: TrainingConfig, total: int, follows: str) -> None:
    """Warm-up ends before the schedule does; `follows` says what `total`, its optimiser steps, follow from."""
    warmup = config.policy.optimizer.warmup_steps
    if warmup > total or (warmup == total and config.policy.optimizer.schedule != "constant"):
        raise ConfigError(
            f"policy.optimizer.warmup_steps={warmup} is more than the {total} optimiser steps of the run "
            f"(policy.optimizer.total_steps, or {follows}); lower it."
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

    check_counted_metric(config)


def _check_overlong(config: Config) -> None:
    overlong, longest = config.reward.overlong_tokens, config.longest_response
    if overlong >= longest:
        raise ConfigError(
            f"reward.overlong_tokens={overlong} punishes every response: it must be below "
            f"{_response_limit(config)}={longest}."
        )


def _response_limit(config: Config) -> str:
    """What sets `longest_response`."""
    if not config.rollout.environment:
        return "rollout.sampling.max_new_tokens"
    if config.rollout.max_episode_tokens:
        return "rollout.max_episode_tokens"
    return "rollout.max_turns * rollout.sampling.max_new_tokens"


def _check_environment(config: Config) -> None:
    rollout = config.rollout
    if not rollout.environment:
        return
    check_function("rollout.environment", rollout.environment)
    turns = {"rollout.sampling": rollout.sampling}
    if config.data.validation:
        turns["validation.sampling"] = config.validation.sampling
    for key, sampling in turns.items():
        if sampling.max_new_tokens > rollout.response_limit(sampling):
            raise ConfigError(
                f"rollout.max_episode_tokens={rollout.max_episode_tokens} is below "
                f"{key}.max_new_tokens={sampling.max_new_tokens}, the longest turn; raise it, or leave it at 0."
            )


def _check_caps(config: Config) -> None:
    """A cap below the longest possible sequence would stop the run at the first batch that has one."""
    longest = config.longest_sequence
    parts = (
        f"data.max_prompt_tokens={config.data.max_prompt_tokens} + "
        f"{_response_limit(config)}={config.longest_response} = {longest} tokens"
    )
    check_caps_hold(config, parts)
    if config.max_model_tokens < config.needed_model_tokens:
        raise ConfigError(
            f"rollout.max_model_tokens={config.max_model_tokens} is below the {config.needed_model_tokens} tokens that "
            f"data.max_prompt_tokens and {_response_limit(config)} (or that of validation.sampling) allow; raise it or "
            "leave it at 0."
        )


def check_caps_hold(config: TrainingConfig, parts: str) -> None:
    """Every cap holds the longest possible sequence; `parts` says what makes its length."""
    longest = config.longest_sequence
    sharing = config.policy.parallel.context_parallel
    for limits in config.limits.values():
        needed, multiple = -(-longest // limits.length_multiple) * limits.length_multiple, limits.length_multiple
        if limits.max_tokens * sharing < needed:
            rounded = f", {needed} as a multiple of {multiple}" if needed > longest else ""
            times = f" times policy.parallel.context_parallel={sharing}" if sharing > 1 else ""
            raise ConfigError(
                f"{limits.cap}={limits.max_tokens}{times} is below the longest possible sequence, {parts}{rounded}; "
                "raise the cap or lower either."
            )


def _check_devices(config: Config) -> None:
    """bfloat16 on CPU is allowed: it works, and it is how a GPU run's rounding is looked at without one."""
    placement = config.rollout_placement
    fits = fits_device(placement, has_gpu=config.uses_gpus)
    if not fits and not config.uses_gpus:
        raise ConfigError(
            f"rollout.placement={placement} needs GPUs and resources.device={config.resources.device} gives none here; "
            "set rollout.placement=auto, or resources.device=cuda for a cluster with GPUs."
        )
    if not fits:
        raise ConfigError(
            "rollout.placement=shared_memory is for CPUs and the run uses GPUs; set colocated or apart, "
            "or resources.device=cpu."
        )
    if placement == "colocated" and config.rollout.overlap:
        raise ConfigError(
            "rollout.overlap=true generates while it trains, but rollout.placement=colocated has them take turns "
            "on the same GPUs; set rollout.placement=apart, or remove rollout.overlap."
        )
    if config.rollout.overlap and config.uses_reward_model:
        raise ConfigError(
            "rollout.overlap=true would have reward.model.path score the next step's samples on the policy's ranks "
            "while they train; remove one of them, or give the reward by a function."
        )
    engine_gpus = config.rollout.replicas * config.rollout.tensor_parallel
    if placement == "colocated" and engine_gpus > config.training_workers:
        raise ConfigError(
            f"rollout.replicas * rollout.tensor_parallel = {engine_gpus} GPUs are more than the "
            f"{config.training_workers} of the policy that they share; lower them, raise policy.ranks, or set "
            "rollout.placement=apart."
        )
    check_attention(config)


def check_attention(config: TrainingConfig) -> None:
    """model.attention is a kernel of the layout, the device and the type."""
    kernel = config.model.attention
    if kernel == "eager" and config.model.attention_layout(shared=config.shares_model) == "packed":
        others = "ranks that share sequences or layers (policy.parallel)" if config.shares_model else "packed rows"
        raise ConfigError(
            f"model.attention=eager is transformers' own, for padded rows, and not for {others}; set model.attention "
            "to auto, varlen, flash3, flash or sdpa."
        )
    if kernel not in ("varlen", "flash3", "flash"):
        return
    if not config.uses_gpus:
        raise ConfigError(f"model.attention={kernel} is a CUDA kernel and the run uses CPUs; set auto or sdpa.")
    if config.model.dtype == "float32":
        raise ConfigError(
            f"model.attention={kernel} takes half precision only; set model.dtype=bfloat16, or attention=sdpa."
        )


def check_parallel(config: TrainingConfig, model: ModelFiles) -> None:
    """Sequences and layers can be shared as policy.parallel asks."""
    parallel = config.policy.parallel
    cp, tp = parallel.context_parallel, parallel.tensor_parallel
    if config.policy.ranks % parallel.replicate:
        raise ConfigError(
            f"policy.parallel.replicate={parallel.replicate} does not divide policy.ranks={config.policy.ranks}."
        )
    if tp > 1 and config.model.lora.rank:
        raise ConfigError(
            "adapters are not shared between ranks; set model.lora.rank=0 or policy.parallel.tensor_parallel=1."
        )
    if tp > 1 and config.model.compile:
        raise ConfigError(
            "model.compile does not take layers that ranks share; set model.compile=false or "
            "policy.parallel.tensor_parallel=1."
        )
    heads, pairs = model.attention_heads, model.key_value_heads
    if cp > 1 and parallel.context_parallel_method == "ulysses" and heads is not None and heads % (cp * tp):
        raise ConfigError(
            f"policy.parallel.context_parallel * tensor_parallel = {cp * tp} does not divide the {heads} attention "
            f"heads of {config.model.path}; set policy.parallel.context_parallel_method=ring."
        )
    if pairs is not None and pairs % tp:
        raise ConfigError(
            f"policy.parallel.tensor_parallel={tp} does not divide the {pairs} key-value heads of {config.model.path}."
        )


def _check_model(config: Config, model: ModelFiles) -> None:
    check_model_type(model.description, "model.path", config.model.path, CAUSAL)
    check_supported_model(config, model.description, "model.path")
    if model.positions is not None and config.max_model_tokens > model.positions:
        raise ConfigError(
            f"prompt and response may reach {config.max_model_tokens} tokens, but {config.model.path} takes "
            f"{model.positions}; lower data.max_prompt_tokens, {_response_limit(config)} or rollout.max_model_tokens."
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
    check_weights(model, "model.path", config.model.path, output=HEAD)
    check_model_sizes(config, model)


def _check_reference(config: Config, model: ModelFiles) -> None:
    if config.reference.path:
        check_same_vocabulary(config, model, "reference.path", config.reference.path, CAUSAL, output=HEAD)


def _check_data(config: Config, model: ModelFiles) -> None:
    _check_sources(config)
    paths = [("data.sources" if config.data.sources else "data.train", path) for path in config.data.weights]
    if config.data.validation:
        paths.append(("data.validation", config.data.validation))
    for key, path in paths:
        record = first_record(key, path, config.data.prompt_key)
        if key != "data.validation":
            check_columns_are_there(config, f"{key}: the first record of {path}", record)
        _check_prompt(config, model, f"{key}: the prompts of {path}", record[config.data.prompt_key])
        if config.data.source_key and config.data.source_key not in record:
            raise ConfigError(
                f"{key}: the first record of {path} has no column data.source_key={config.data.source_key!r}."
            )
    if config.data.curriculum:
        check_function("data.curriculum", config.data.curriculum)


def _check_sources(config: Config) -> None:
    for path, weight in config.data.sources.items():
        if not (weight > 0 and math.isfinite(weight)):
            raise ConfigError(f"data.sources: the weight of {path} must be above 0, not {weight:g}.")
    if bool(config.data.train) == bool(config.data.sources):
        raise ConfigError("one of data.train and data.sources (several, by weight) must be set, and not both.")


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


def first_record(key: str, path: str, prompt_key: str = "") -> dict[str, Any]:
    """The first record of a data set. Raises ConfigError, naming `key`, if there is none with a prompt."""
    try:
        record = next(iter_records(path, prompt_key), None)
    except DataError as error:
        raise ConfigError(f"{key}: {error}") from None
    if record is None:
        raise ConfigError(f"{key}: {path} has no records.")
    return record


def _check_rewards(config: Config) -> None:
    given = bool(config.reward.function) + bool(config.reward.functions)
    if given > 1 or not (given or config.rollout.environment or config.uses_reward_model):
        raise ConfigError(
            "one of reward.function and reward.functions (several, by weight) must be set, and not both; "
            "rollout.environment and reward.model.path need none."
        )
    key = "reward.functions" if config.reward.functions else "reward.function"
    names: dict[str, str] = {}
    for function, weight in config.reward.weights.items():
        check_function(key, function)
        if not math.isfinite(weight):
            raise ConfigError(f"{key}: the weight of {function} must be a finite number, not {weight}.")
        other = names.setdefault(function.rpartition(":")[2], function)
        if other != function:
            raise ConfigError(f"{key}: {other} and {function} have the same name in metrics; rename one of them.")
